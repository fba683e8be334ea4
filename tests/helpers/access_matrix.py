"""Who may call what: every route and method, for every role and whose policy, and what must come of it.

What is expected of the gateway is computed from the roles alone, apart from the code that enforces it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx

from engine.serving.gateway.route_table import ROUTES, Endpoint, Kind

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
ROLE_SETS = {
    "infer": ["infer"], "pin": ["infer", "pin"], "feedback": ["feedback"], "score": ["infer", "pin", "score"],
    "train": ["infer", "train"], "release": ["release"], "metrics": ["metrics"],
}  # fmt: skip
EVERY = sorted({role for roles in ROLE_SETS.values() for role in roles})
SAMPLES = "/graftwork/samples"
# Routes that name a model.
ASKING = [route.path for route in ROUTES if route.fields is not None] + ["/v1/prewarm"]
TURNS = [{"role": "user", "content": "What is it?"}]
SENTENCE = {"prompt": "What is it?", "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": SENTENCE,
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 4},
    "/v1/responses": {"input": "What is it?", "max_output_tokens": 4},
    "/v1/messages": {"messages": TURNS, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/tokenize": {"prompt": "What is it?"},
    "/detokenize": {"tokens": [1]},
    SAMPLES: {"prompt": [1], "max_tokens": 4},
    "/v1/prewarm": {},
}
# Of the controller, with a release `r1`, the table `scores` and the file `f1`.
CONTROLLER = (
    ("GET", "/"), ("GET", "/status"), ("GET", "/metrics"), ("GET", "/ledger/scores"), ("GET", "/policies"),
    ("GET", "/releases"), ("GET", "/releases/r1"), ("GET", "/notices"), ("POST", "/notices/inbox"),
    ("POST", "/policies"), ("POST", "/releases"), ("POST", "/releases/r1/approve"),
    ("POST", "/releases/r1/pause"), ("POST", "/releases/r1/resume"),
    ("POST", "/releases/r1/hold"), ("POST", "/probes"), ("POST", "/promote"), ("POST", "/rollback"),
    ("POST", "/lift"), ("POST", "/restore"), ("POST", "/purge"), ("POST", "/erase"), ("POST", "/recheck"),
    ("POST", "/freeze"), ("POST", "/thaw"), ("POST", "/events/f1"), ("POST", "/ledger"),
)  # fmt: skip
TRAINER = (
    ("GET", "/status"), ("GET", "/sessions"), ("GET", "/metrics"), ("POST", "/sessions"),
    ("POST", "/session_heartbeat"), ("POST", "/close_session"), ("POST", "/forward"),
    ("POST", "/forward_backward"), ("POST", "/optim_step"), ("POST", "/save_state"), ("POST", "/load_state"),
    ("POST", "/delete_state"),
    ("POST", "/export"), ("POST", "/probe"), ("POST", "/forget_policy"), ("GET", "/operations/x"),
    ("DELETE", "/operations/x"),
)  # fmt: skip


@dataclass(frozen=True)
class Names:
    """Policies: one's own, another tenant's, and one that does not exist; the last two are as long."""

    own: str
    theirs: str
    absent: str


def body_of(path: str, model: str) -> dict[str, Any]:
    """Return a small valid body for a path."""
    return {**BODIES[path], "model": model}


def expected(route: Endpoint, method: str, who: str | None, is_own: bool) -> int:
    """Return the status that the gateway owes to a caller without a key (None), of a role, or `admin`."""
    if not route.roles and method in route.methods:
        return 200
    if method == "OPTIONS":
        return 204
    if who is None:
        return 401
    if method not in route.methods:
        return 405
    roles = [*EVERY, "admin"] if who == "admin" else ROLE_SETS[who]
    # The purpose of a plain request is `user`, which takes `infer`.
    needed = ["infer"] if route.kind is Kind.GENERATE and route.path != SAMPLES else route.roles
    if not set(needed) & set(roles):
        return 403
    if not is_own and (route.path in ASKING or route.is_prefix):
        return 404
    # No such answer was given to anybody.
    return {"/v1/prewarm": 202, "/v1/feedback": 404}.get(route.path, 200)


async def gateway_faults(
    clients: Mapping[str | None, httpx.AsyncClient], names: Names
) -> list[tuple[Any, ...]]:
    """Ask for every cell of the gateway's matrix; return what was answered wrong.

    `clients` have a key of each role for `names.own`, of an admin, and none (None). What is said of another
    tenant's policy and of an absent one must be the same bytes, once the name is replaced.
    """
    wrong: list[tuple[Any, ...]] = []
    for (who, client), route, method in product(clients.items(), ROUTES, METHODS):
        if (who, route.path, method) == ("admin", "/graftwork/drain", "POST"):
            # It would end the engine's use for the tests after this one.
            continue
        # An admin's are all of them.
        whose = {names.own: True, names.theirs: who == "admin", names.absent: False}
        answers = {}
        for name, is_own in whose.items():
            answer = await ask(client, route, method, name)
            answers[name] = told(answer, name)
            if answer.status_code != (status := expected(route, method, who, is_own)):
                wrong.append((who, method, route.path, name, answer.status_code, status, answer.text[:200]))
        theirs, absent = answers[names.theirs], answers[names.absent]
        if who != "admin" and expected(route, method, who, False) >= 400 and theirs != absent:
            wrong.append((who, method, route.path, theirs, absent))
    return wrong


async def ask(client: httpx.AsyncClient, route: Endpoint, method: str, name: str) -> httpx.Response:
    path = route.path + (name if route.is_prefix else "")
    if route.path == "/v1/feedback":
        return await client.request(method, path, json={"request_id": name, "reward": 1})
    if route.path == "/graftwork/copies":
        return await client.request(method, path, json={"policies": {}, "most": 0})
    body = body_of(path, name) if route.path in ASKING else {"model": name}
    return await client.request(method, path, json=body)


def told(answer: httpx.Response, name: str) -> tuple[int, bytes, dict[str, str]]:
    """Return what an answer says, without the asked name, the request's id and the date."""
    kept = {key: text for key, text in answer.headers.items() if key not in ("x-request-id", "date")}
    return answer.status_code, answer.content.replace(name.encode(), b"NAME"), kept


def refusals(
    client: httpx.Client, calls: Sequence[tuple[str, str]], names: Names, allowed: Sequence[str] = ()
) -> list[tuple[Any, ...]]:
    """Ask a service for each of its paths with each method as a caller that may only read `allowed`.

    Return what was not refused with 401, or differs with the policy that the request names.
    """
    wrong: list[tuple[Any, ...]] = []
    for method, path in product(METHODS, sorted({path for _, path in calls})):
        if (method, path) in calls and path in allowed:
            continue
        answers = [
            told(client.request(method, path, json={"policy": name, "name": name, "tenant": name}), name)
            for name in (names.theirs, names.absent)
        ]
        want = 405 if path in allowed else 401
        if answers[0] != answers[1] or answers[0][0] != want:
            wrong.append((method, path, *answers))
    return wrong
