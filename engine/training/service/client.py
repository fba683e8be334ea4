"""The trainer's client: one method for each operation; each call waits for its result.

Connection errors are retried with the same request id, so nothing is applied twice. When the trainer is full,
the client waits for as long as it says. A refused request raises the error that the trainer names.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
from pydantic import ValidationError

from engine import errors
from engine.clients.http_client import ServiceClient, body_of
from engine.errors import Busy, ConfigError, GraftworkError, ServiceError
from engine.quality.probe import Probe, from_json
from engine.security.credentials import known_credential
from engine.settings.params import Params, explain
from engine.threads import PeriodicThread
from engine.training.service import protocol
from engine.training.service.protocol import Exported, SessionInfo

POLL_S = 20.0
# Well below the trainer's lease.
HEARTBEAT_S = 8.0
# A training run fails when one operation takes this long, and so do ranks that wait for each other.
OPERATION_S = 600.0
Body = TypeVar("Body", bound=protocol.Request)


class _Lost(ServiceError):
    """The trainer has restarted and does not know the operation."""


class TrainerClient(ServiceClient):
    """A client of the trainer at `url` with its `key`; it waits up to `patience_s` for an absent trainer.

    A heartbeat renews the leases of its sessions until they or the client are closed. It retries a full
    trainer for up to `busy_s`; `backpressure_s` holds the seconds that each session has waited for that.
    It counts gathered gradients, so that a step is refused when the trainer lost some.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        patience_s: float = 90.0,
        timeout_s: float = OPERATION_S,
        busy_s: float = 600.0,
    ):
        super().__init__("trainer", url, key, timeout_s=POLL_S + 10, patience_s=patience_s)
        self.timeout_s, self.busy_s = timeout_s, busy_s
        self.backpressure_s: defaultdict[str, float] = defaultdict(float)
        self._gathered: dict[str, int] = {}
        self._writing: dict[str, int] = {}
        self._heart: PeriodicThread | None = None

    @classmethod
    def of(cls, params: Params, **waits: float) -> "TrainerClient":
        """Return a client of the installation's trainer, with its key."""
        return cls(params.url("trainer"), known_credential(params.paths, "trainer"), **waits)

    def health(self) -> dict[str, Any]:
        """Return the trainer's base digest, pid, sessions and queue state."""
        return self._ask("GET", "/status")

    def create_session(self, session: str, policy: str, **settings: Any) -> SessionInfo:
        """Open or continue a session; the fields are those of `protocol.CreateSession`."""
        given = {"request_id": _new_id(), **settings}
        body = _body(protocol.CreateSession, session=session, policy=policy, **given)
        result = self._run("/sessions", body)
        self._gathered[session], self._writing[session] = 0, result["fence"]
        if self._heart is None:
            self._heart = PeriodicThread("trainer-heartbeat", HEARTBEAT_S, self._beat, at_once=False)
            self._heart.start()
        return _info(result)

    def close_session(self, session: SessionInfo) -> None:
        """Close the session, so that another writer may open its policy at once."""
        self._writing.pop(session.session, None)
        self._run("/close_session", protocol.CloseSession(**_who(session)))

    def release(self) -> None:
        """Ask the trainer once to close the sessions that this client has open, so that others may write.

        A trainer that does not answer ends their leases by itself.
        """
        for session, fence in list(self._writing.items()):
            body = protocol.CloseSession(request_id=_new_id(), session=session, fence=fence)
            with suppress(httpx.TransportError):
                self.http.post("/close_session", json=body.model_dump())
        self._writing.clear()

    def sessions(self) -> list[dict[str, Any]]:
        """Describe the trainer's sessions: those in memory and the newest stored ones."""
        return list(self._ask("GET", "/sessions")["sessions"])

    def forward(self, session: SessionInfo, data: Sequence[protocol.Datum]) -> list[list[float]]:
        """Return each datum's log-probabilities under the session's adapter."""
        batch = protocol.ForwardBackwardInput(data=list(data))
        outputs = self._run("/forward", protocol.Forward(**_who(session), forward_input=batch))
        return [row["logprobs"]["data"] for row in outputs["loss_fn_outputs"]]

    def forward_only(
        self,
        session: SessionInfo,
        data: Sequence[protocol.Datum],
        loss: str = "cross_entropy",
        config: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Return what `forward_backward` returns for the reduction `sum`, without gathering gradients.

        The metrics are `loss`, the sum, and `tokens`.
        """
        batch = protocol.ForwardBackwardInput(
            data=list(data), loss_fn=loss, loss_fn_config=dict(config or {}), reduction="sum"
        )
        return self._run("/forward", protocol.Forward(**_who(session, request_id), forward_input=batch))

    def forward_backward(
        self,
        session: SessionInfo,
        data: Sequence[protocol.Datum],
        loss: str = "dapo",
        config: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        router_replay: bool = False,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> dict[str, Any]:
        """Gather gradients; return each datum's log-probabilities and the metrics.

        `loss_fn_outputs[i]["logprobs"]["data"]` has one value for each completion token of datum i, or with
        the reduction `sum` one for each target (N, or N * K row-major); `metrics["loss"]` is then the sum.
        """
        batch = protocol.ForwardBackwardInput(
            data=list(data),
            loss_fn=loss,
            loss_fn_config=dict(config or {}),
            router_replay=router_replay,
            reduction=reduction,
        )
        who = {**_who(session, request_id), "gathered": self._gathered.get(session.session)}
        body = protocol.ForwardBackward(**who, forward_backward_input=batch)
        result = self._run("/forward_backward", body)
        if session.session in self._gathered:
            self._gathered[session.session] += 1
        return result

    def optim_step(
        self, session: SessionInfo, adam: protocol.AdamParams, request_id: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Apply the gathered gradients; `fields` are `position`, `record`, `skip`. Durable on return.

        Raises `ServiceError` when the trainer has lost gradients: open the session and repeat the step.
        """
        who = {**_who(session, request_id), "gathered": self._gathered.get(session.session)}
        result = self._run("/optim_step", _body(protocol.OptimStep, **who, adam_params=adam, **fields))
        self._gathered[session.session] = 0
        return result

    def save_state(self, session: SessionInfo, name: str) -> Path:
        """Store the session under a name; return the state file's path."""
        body = _body(protocol.SaveState, **_who(session), name=name)
        return Path(self._run("/save_state", body)["path"])

    def load_state(
        self, session: SessionInfo, name: str, source: str | None = None, moments: bool = True
    ) -> SessionInfo:
        """Load the state of a name, of this session or of `source`; gathered gradients are dropped."""
        fields = {"name": name, "source": source, "moments": moments}
        result = self._run("/load_state", _body(protocol.LoadState, **_who(session), **fields))
        self._gathered[session.session] = 0
        return _info(result)

    def delete_state(self, session: str, name: str) -> None:
        """Delete a session's state of a name; the session need not be open. Idempotent."""
        self._run(
            "/delete_state", _body(protocol.DeleteState, request_id=_new_id(), session=session, name=name)
        )

    def export(self, session: SessionInfo, kind: protocol.Kind = "snapshot", **fields: Any) -> Exported:
        """Publish the session's adapter; a revision needs `probe_prompts`, lists of token ids.

        A snapshot expires after `ttl_s`, by default the session's `snapshot_ttl_s`.
        """
        who = _who(session, fields.pop("request_id", None))
        result = self._run("/export", _body(protocol.Export, **who, kind=kind, **fields))
        return Exported(**{**result, "directory": Path(result["directory"]) if result["directory"] else None})

    def probe_revision(
        self,
        policy: str,
        digest: str,
        prompts: Sequence[Sequence[int]],
        tokens: int = 24,
        directory: Path | None = None,
    ) -> Probe:
        """Compute the effect probe of a revision that the trainer did not train.

        The revision is read from `directory`, verified against its manifest, or without one from the store.
        `prompts` are token ids; each gets up to `tokens` more. Raises `AdapterError` or `BaseModelError`
        when the revision does not fit the base.
        """
        body = protocol.ProbeRevision(
            request_id=_new_id(),
            policy=policy,
            digest=digest,
            directory=str(directory) if directory else None,
            prompts=[list(prompt) for prompt in prompts],
            tokens=tokens,
        )
        return from_json(self._run("/probe", body))

    def forget_policy(self, policy: str, only_ask: bool = False) -> dict[str, int]:
        """Remove every session of a policy, or only check; `Conflict` while one of them is open."""
        body = protocol.ForgetPolicy(request_id=_new_id(), policy=policy, only_ask=only_ask)
        return self._run("/forget_policy", body)

    def cancel(self, request_id: str) -> None:
        """Cancel an operation; `Conflict` when it has begun and cannot stop."""
        self._ask("DELETE", f"/operations/{request_id}")

    def close(self) -> None:
        """Stop the heartbeat and close the connection; open sessions keep their leases until they expire."""
        if self._heart is not None:
            self._heart.stop()
            self._heart.join(HEARTBEAT_S)
        super().close()

    def _beat(self) -> None:
        for session, fence in list(self._writing.items()):
            body = protocol.Heartbeat(session=session, fence=fence).model_dump()
            # The next operation waits for an absent trainer; a closed client raises RuntimeError.
            with suppress(httpx.TransportError, RuntimeError):
                self.http.post("/session_heartbeat", json=body)

    def _run(self, path: str, body: protocol.Request) -> dict[str, Any]:
        def send() -> dict[str, Any]:
            sent = self.http.post(path, content=body.model_dump_json(), headers=_JSON)
            return self._wait(self._json_of(sent, dict)["operation"])

        session, until = str(getattr(body, "session", "")), time.monotonic() + self.busy_s
        while True:
            try:
                return self._patiently(send, _Lost)
            except Busy as busy:
                if time.monotonic() + busy.retry_after_s > until:
                    raise
                self.backpressure_s[session] += busy.retry_after_s
                time.sleep(busy.retry_after_s)

    def _wait(self, operation: str) -> dict[str, Any]:
        until = time.monotonic() + self.timeout_s
        while time.monotonic() < until:
            response = self.http.get(f"/operations/{operation}", params={"wait_s": POLL_S})
            if response.status_code == 404:
                raise _Lost(
                    f"The trainer at {self.url} has restarted and does not know the operation {operation}."
                )
            answer = self._json_of(response, dict)
            if answer["state"] == "done":
                return dict(answer["result"])
            if answer["state"] != "pending":
                raise _error(answer)
        raise ServiceError(
            f"The trainer did not finish the operation {operation} within {self.timeout_s:.0f} s."
        )

    def _error_of(self, response: httpx.Response) -> GraftworkError:
        answer = body_of(response)
        return _error(answer) if "kind" in answer else super()._error_of(response)


_JSON = {"content-type": "application/json"}


def _who(session: SessionInfo, request_id: str | None = None) -> dict[str, Any]:
    return {"request_id": request_id or _new_id(), "session": session.session, "fence": session.fence}


def _new_id() -> str:
    return uuid.uuid4().hex


def _info(result: Mapping[str, Any]) -> SessionInfo:
    return SessionInfo(**{**result, "history": tuple(result["history"])})


def _body(kind: type[Body], /, **fields: Any) -> Body:
    try:
        return kind(**fields)
    except ValidationError as error:
        raise ConfigError(f"The request is not valid. {explain(error, kind)}") from None


def _error(answer: Mapping[str, Any]) -> GraftworkError:
    kind, sentence = getattr(errors, answer["kind"], ServiceError), answer["error"]
    if kind is Busy:
        return Busy(sentence, answer["retry_after_s"], answer["queue"])
    return kind(sentence) if issubclass(kind, GraftworkError) else ServiceError(sentence)
