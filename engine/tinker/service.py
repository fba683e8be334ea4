"""The Tinker API's HTTP service, for the SDK 0.38.0.

    python -m engine.tinker.service --params FILE

A call that takes time answers at once with a request id; its result is asked for by `retrieve_future`.
Telemetry is accepted and never read: its events hold the client's key.
"""

import argparse
import asyncio
import logging
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from engine.catalog.catalog import Key
from engine.catalog.opening import open_catalog
from engine.catalog.tinker_records import TinkerCheckpoint, TinkerModel, TinkerSampler, TinkerSession
from engine.errors import Busy, ConfigError, GraftworkError, NotFound
from engine.logs import set_up
from engine.security.http import HEALTH, server_options, trusted
from engine.settings.params import Params, load_params
from engine.threads import Work
from engine.tinker import bodies
from engine.tinker.backend import Backend
from engine.tinker.body_limit import BodyLimit, decompressed
from engine.tinker.callers import HEALTHZ, KeyFirst
from engine.tinker.codec import UnreadData, read_batch
from engine.tinker.models import NOT_TRAINED, SAMPLER, TYPES, WEIGHTS, Models

# A client gives a poll up after 45 s.
POLL_S = 30.0
SWEEP_S = 60.0
# Our own choices among the SDK's; all others are its defaults.
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": True, "use_pyqwest_transport": True, "pjwt_auth_enabled": False}
# The same for an HTTP client's retries of a call.
Idempotency = Annotated[str, Header(max_length=200)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=1 << 40)]


def make_app(models: Models) -> FastAPI:
    """Return the HTTP application over sessions, models and checkpoints."""
    app = FastAPI(
        title="Graftwork: Tinker API",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_lifespan(models),
    )
    app.add_middleware(BodyLimit)
    app.add_middleware(KeyFirst, models=models)
    app.add_exception_handler(GraftworkError, _answer_error)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _invalid(models))  # type: ignore[arg-type]

    @app.get(HEALTH)
    @app.get(HEALTHZ)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    def caller(request: Request) -> Key:
        key: Key = request.state.key
        return key

    _add_session_routes(app, models, Annotated[Key, Depends(caller)])
    _add_training_routes(app, models, Annotated[Key, Depends(caller)])
    _add_checkpoint_routes(app, models, Annotated[Key, Depends(caller)])
    return app


def _add_session_routes(app: FastAPI, models: Models, caller: Any) -> None:
    @app.post("/api/v1/client/config")
    async def client_config(key: caller) -> dict[str, Any]:
        return CLIENT_CONFIG

    @app.post("/api/v1/client/dynamic_config")
    async def dynamic_config(key: caller) -> dict[str, Any]:
        return {}

    @app.post("/api/v1/telemetry")
    async def telemetry(key: caller) -> dict[str, str]:
        return {"status": "accepted"}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities(key: caller) -> dict[str, Any]:
        return {"supported_models": [models.backend.described()]}

    @app.post("/api/v1/create_session")
    async def create_session(
        body: bodies.SessionSent, key: caller, x_idempotency_key: Idempotency = ""
    ) -> dict[str, Any]:
        id = await models.ask(models.create_session, key, body, x_idempotency_key)
        return {"session_id": id, "type": "create_session"}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(body: bodies.HeartbeatSent, key: caller) -> Response:
        try:
            await models.hear(key, body.session_id)
        except NotFound as error:
            return JSONResponse({"detail": str(error)}, 410)
        return JSONResponse({"type": "session_heartbeat"})

    @app.post("/api/v1/sessions/{id}/finish")
    async def finish(id: str, body: bodies.FinishSent, key: caller) -> dict[str, Any]:
        await models.finish(key, id, body.reason.type)
        return {}

    @app.get("/api/v1/sessions/{id}")
    async def session(id: str, key: caller) -> dict[str, Any]:
        session = await models.ask(models.index.find, TinkerSession, key.owner, id)
        if session is None:
            raise NotFound("There is no such session.")
        trained = await models.ask(models.index.all_of, TinkerModel, key.owner, "session", id)
        sampled = await models.ask(models.index.all_of, TinkerSampler, key.owner, "session", id)
        return {
            "training_run_ids": [one.id for one in trained],
            "sampler_ids": [one.id for one in sampled],
            "user_metadata": session.user_metadata,
        }

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(body: bodies.RetrieveSent, key: caller) -> Response:
        try:
            result = await models.retrieve(key, body.request_id, POLL_S)
        except KeyError:
            return JSONResponse(
                {"detail": "The result is gone. Repeat the call, or start from a checkpoint."}, 410
            )
        if result is None:
            return JSONResponse(models.queue_state(body.request_id), 408)
        return Response(result.body, media_type=result.media_type)


def _add_training_routes(app: FastAPI, models: Models, caller: Any) -> None:
    def promised(id: str, model: str | None = None) -> dict[str, Any]:
        return {"request_id": id, **({"model_id": model} if model else {})}

    @app.post("/api/v1/create_model")
    async def create_model(body: bodies.CreateModelSent, key: caller, response: Response) -> dict[str, Any]:
        id = await models.create_model(key, body)
        if body.lora_config is None or body.lora_config.train_unembed:
            response.headers["x-deprecation-note"] = NOT_TRAINED
            response.headers["x-deprecation-level"] = "warning"
        return promised(id)

    @app.post("/api/v1/load_weights")
    async def load_weights(body: bodies.LoadWeightsSent, key: caller) -> dict[str, Any]:
        load = models.load_into if body.model_id else models.load_new
        return promised(await load(key, body), body.model_id)

    @app.post("/api/v1/get_info")
    async def get_info(body: bodies.ModelSent, key: caller) -> dict[str, Any]:
        model = await _model(models, key, body.model_id)
        base = models.backend.base_name
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {"arch": models.backend.architecture, "model_name": base},
            "is_lora": True,
            "lora_rank": model.rank,
            "model_name": base,
        }

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request, key: caller) -> dict[str, Any]:
        encoding = request.headers.get("content-encoding", "")
        body = await models.ask(decompressed, await request.body(), encoding)
        try:
            batch = await models.ask(read_batch, body)
        except UnreadData as error:
            return promised(await models.refuse(key, error.model_id, error.seq_id, error), error.model_id)
        return promised(await models.forward_backward(key, batch), batch.model_id)

    @app.post("/api/v1/optim_step")
    async def optim_step(body: bodies.OptimStepSent, key: caller) -> dict[str, Any]:
        return promised(await models.optim_step(key, body), body.model_id)

    @app.post("/api/v1/save_weights")
    async def save_weights(body: bodies.SaveSent, key: caller) -> dict[str, Any]:
        return promised(await models.save(key, body), body.model_id)

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_weights_for_sampler(body: bodies.SaveSent, key: caller) -> dict[str, Any]:
        return promised(await models.save_for_sampler(key, body), body.model_id)

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(body: bodies.SamplingSessionSent, key: caller) -> dict[str, Any]:
        id = await models.ask(models.create_sampler, key, body)
        return {"sampling_session_id": id, "type": "create_sampling_session"}

    @app.get("/api/v1/samplers/{id}")
    async def sampler(id: str, key: caller) -> dict[str, Any]:
        sampler = await models.ask(models.sampler, key, id)
        return {"sampler_id": id, "base_model": models.backend.base_name, "model_path": sampler.path}

    @app.post("/api/v1/asample")
    async def asample(body: bodies.SampleSent, key: caller, request: Request) -> dict[str, Any]:
        id = await models.sample(key, request.headers["x-api-key"], body)
        return {**promised(id), "sample_sequence_ids": [f"{id}:{n}" for n in range(body.num_samples)]}


def _add_checkpoint_routes(app: FastAPI, models: Models, caller: Any) -> None:
    runs = "/api/v1/training_runs"
    checkpoint_path = runs + "/{model}/checkpoints/{kind}/{name}"

    @app.get(runs)
    async def training_runs(key: caller, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        page, total = await models.ask(models.index.page, TinkerModel, key.owner, limit, offset)
        run_rows = [await models.ask(_run, models, model) for model in page if key.sees(model.policy)]
        return {"training_runs": run_rows, "cursor": {"offset": offset, "limit": limit, "total_count": total}}

    @app.get(runs + "/{model}")
    async def training_run(model: str, key: caller) -> dict[str, Any]:
        return await models.ask(_run, models, await _model(models, key, model))

    @app.get(runs + "/{model}/checkpoints")
    async def checkpoints_of(model: str, key: caller) -> dict[str, Any]:
        await _model(models, key, model)
        rows = await models.ask(models.index.all_of, TinkerCheckpoint, key.owner, "model", model)
        return {"checkpoints": [_checkpoint(row) for row in rows]}

    @app.get("/api/v1/checkpoints")
    async def checkpoints(key: caller, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        page, total = await models.ask(models.index.page, TinkerCheckpoint, key.owner, limit, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        if key.policies:
            page = await models.ask(models.seen_by, key, page)
        return {"checkpoints": [_checkpoint(row) for row in page], "cursor": cursor}

    @app.delete(checkpoint_path)
    async def delete(model: str, kind: str, name: str, key: caller) -> dict[str, Any]:
        await models.ask_trainer(models.delete, *await models.ask(models.checkpoint, key, model, kind, name))
        return {}

    @app.put(checkpoint_path + "/ttl")
    async def ttl(model: str, kind: str, name: str, body: bodies.TtlSent, key: caller) -> dict[str, Any]:
        row, _ = await models.ask(models.checkpoint, key, model, kind, name)
        expires_at = time.time() + body.ttl_seconds if body.ttl_seconds else None
        changed = replace(row, expires_at=expires_at)
        await models.ask(models.index.change_checkpoint, changed)
        return _checkpoint(changed)

    @app.post(checkpoint_path + "/publish")
    async def publish(model: str, kind: str, name: str, key: caller) -> dict[str, Any]:
        row, _ = await models.ask(models.checkpoint, key, model, kind, name)
        if row.kind != SAMPLER:
            raise ConfigError("A state is not published. Save it with save_weights_for_sampler first.")
        # A published revision is the catalog's: only its own rules remove it.
        await models.ask(models.index.change_checkpoint, replace(row, public=True, expires_at=None))
        return {}

    @app.delete(checkpoint_path + "/publish")
    async def unpublish(model: str, kind: str, name: str, key: caller) -> dict[str, Any]:
        row, _ = await models.ask(models.checkpoint, key, model, kind, name)
        await models.ask(models.index.change_checkpoint, replace(row, public=False))
        return {}

    @app.post("/api/v1/weights_info")
    async def weights_info(body: bodies.WeightsInfoSent, key: caller) -> dict[str, Any]:
        _, model = await models.ask(models.find_path, key, body.tinker_path)
        attention, mlp = models.backend.trains(model.targets)
        return {
            "base_model": models.backend.base_name,
            "is_lora": True,
            "lora_rank": model.rank,
            "train_unembed": False,
            "train_attn": attention,
            "train_mlp": mlp,
        }


async def _model(models: Models, key: Key, id: str) -> TinkerModel:
    return (await models.find(key, id)).model


def _run(models: Models, model: TinkerModel) -> dict[str, Any]:
    """Describe a model as a training run."""
    rows = models.index.all_of(TinkerCheckpoint, model.tenant, "model", model.id)
    newest = {row.kind: _checkpoint(row) for row in rows}
    return {
        "training_run_id": model.id,
        "base_model": models.backend.base_name,
        "model_owner": model.tenant,
        "is_lora": True,
        "corrupted": model.corrupted,
        "lora_rank": model.rank,
        "last_request_time": _iso(model.used_at),
        "last_checkpoint": newest.get(WEIGHTS),
        "last_sampler_checkpoint": newest.get(SAMPLER),
        "user_metadata": model.user_metadata,
    }


def _checkpoint(row: TinkerCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": TYPES[row.kind],
        "time": _iso(row.created_at),
        "tinker_path": row.path,
        "size_bytes": row.bytes,
        "public": row.public,
        "user_metadata": row.user_metadata,
        "expires_at": _iso(row.expires_at) if row.expires_at else None,
    }


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


async def _answer_error(_request: Request, error: GraftworkError) -> JSONResponse:
    # At most what the SDK waits; whole seconds (RFC 9110, section 10.2.3).
    wait = str(min(60, math.ceil(error.retry_after_s))) if isinstance(error, Busy) else ""
    headers = {"Retry-After": wait} if wait else {}
    return JSONResponse({"detail": str(error)}, error.status, headers)


def _invalid(models: Models) -> Any:
    async def answer(request: Request, error: RequestValidationError) -> JSONResponse:
        # What was sent is not repeated: it may be neither valid JSON nor fit to be shown.
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5])
        sentence = f"The request is not valid. {faults}."
        with suppress(ValidationError, GraftworkError, AttributeError):
            # The client goes on with the next number, which waits for this one.
            call = bodies.NumberedSent.model_validate(error.body)
            await models.refuse(request.state.key, call.model_id, call.seq_id, ConfigError(sentence))
        return JSONResponse({"detail": sentence}, 422)

    return answer


def _lifespan(models: Models) -> Any:
    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        sweep = asyncio.create_task(_sweep(models))
        yield
        sweep.cancel()
        models.close()

    return running


async def _sweep(models: Models) -> None:
    """Delete expired checkpoints and close the sessions of clients that are gone, now and then."""
    work = Work("tinker-sweep")
    try:
        while True:
            await asyncio.sleep(SWEEP_S)
            # Where a service is down the next round meets what is left.
            with work.turning():
                await models.ask(models.delete_expired)
                await models.close_silent()
    finally:
        work.end()


def main() -> int:
    """Run the service until it is stopped; return the exit code."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="python -m engine.tinker.service", description=__doc__)
    parser.add_argument("--params", required=True, type=Path, help="resolved settings (YAML or JSON)")
    params: Params = load_params(parser.parse_args().params)
    set_up(params.log_format, logging.WARNING)
    try:
        catalog = open_catalog(params.paths, migrated=True)
        backend = Backend(params, catalog)
    except GraftworkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    app = trusted(make_app(Models(catalog, backend)), params.listener("tinker"))
    options = server_options(params.listener("tinker"))
    uvicorn.run(app, access_log=False, log_config=None, timeout_graceful_shutdown=1, **options)
    backend.close()
    catalog.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
