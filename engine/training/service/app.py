"""The trainer's HTTP service: one resident base, sessions of many policies, operations that can be polled.

    python -m engine.training.service.app --params FILE
    torchrun --standalone --nproc-per-node W -m engine.training.service.app --params FILE

The second starts W ranks, of which each holds a part of the base; rank 0 is the service.
Every mutating call answers at once with an operation's id, or with 503, `Retry-After` and the queue's state.
One thread carries operations out and takes sessions in turns. An operation's id is the client's request id,
so a repeated request is carried out once, also across a restart if its result was stored.
"""

import argparse
import asyncio
import json
import math
import os
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse

from engine.base.prompts import end_tokens
from engine.base.resident import BaseInfo, base_config, ensure_base
from engine.errors import Busy, Cancelled, ConfigError, GraftworkError, ServiceError
from engine.lean_imports import lean_imports
from engine.logs import set_up
from engine.planning.gpu import cuda_bytes, planned, trainer_device
from engine.planning.host import free_bytes, microbatch_tokens, takes_all_cores
from engine.ports import bind
from engine.process_reaper import die_with_parent
from engine.security.credentials import credential
from engine.security.http import HEALTH, guarded, server_options
from engine.settings.params import Params, load_params
from engine.settings.reproducible import equal_bits
from engine.training.service import protocol
from engine.training.service.client import OPERATION_S
from engine.version import code_version

if TYPE_CHECKING:
    from engine.planning.memory import MemoryPlan
    from engine.training.model.lora import ResidentBase
    from engine.training.model.ranks import Ranks
    from engine.training.model.sharded import ShardedBase
    from engine.training.service.trainer import Trainer

LONGEST_WAIT_S = 30.0
NICENESS = 10
# What a launcher tells each rank beside WORLD_SIZE.
LAUNCHER = ("RANK", "MASTER_ADDR", "MASTER_PORT")
# Default number of listed sessions.
NEWEST = 100
# The methods of `Trainer` that the queue carries out, by their names, with what each is asked.
OPERATIONS: dict[str, type[protocol.Request]] = {
    "create_session": protocol.CreateSession,
    "close_session": protocol.CloseSession,
    "forward": protocol.Forward,
    "forward_backward": protocol.ForwardBackward,
    "optim_step": protocol.OptimStep,
    "save_state": protocol.SaveState,
    "load_state": protocol.LoadState,
    "delete_state": protocol.DeleteState,
    "export": protocol.Export,
    "probe": protocol.ProbeRevision,
    "forget_policy": protocol.ForgetPolicy,
}
Seconds = Annotated[float, Query(ge=0, allow_inf_nan=False)]


def make_app(trainer: "Trainer") -> FastAPI:
    """Return the HTTP application of a trainer."""
    app = FastAPI(title="Graftwork trainer", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(GraftworkError, _answer_error)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _answer_invalid)  # type: ignore[arg-type]

    @app.get(HEALTH)
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/status")
    def status() -> dict[str, Any]:
        return {"status": "ok", "base": trainer.base_digest, "pid": os.getpid(), **trainer.health()}

    @app.get("/sessions")
    def sessions(limit: Annotated[int, Query(ge=1, le=10_000)] = NEWEST) -> dict[str, Any]:
        return {"sessions": trainer.sessions.rows(limit)}

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(trainer.metrics.render(trainer.sessions.resident(), trainer.queue))

    @app.post("/session_heartbeat")
    def session_heartbeat(body: protocol.Heartbeat) -> dict[str, bool]:
        return {"writes": trainer.sessions.hear(body.session, body.fence)}

    def accept(name: str, message: type[protocol.Request]) -> None:
        def submitted(body: Any) -> dict[str, str]:
            return {"operation": trainer.submit(body, getattr(trainer, name))}

        submitted.__annotations__["body"] = message
        app.post("/sessions" if name == "create_session" else f"/{name}")(submitted)

    for name, message in OPERATIONS.items():
        accept(name, message)

    @app.get("/operations/{id}")
    async def operation(id: str, wait_s: Seconds = 0.0) -> dict[str, Any]:
        """Answer `pending`, `done` with the result, or `failed` with the error, after at most `wait_s`."""
        # In a thread: an operation from before a restart is searched for in many files.
        future = await asyncio.to_thread(trainer.operation, id)
        waiting = asyncio.wrap_future(future)
        # Retrieve the error, so that asyncio does not log what the client is told.
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait([waiting], timeout=min(wait_s, LONGEST_WAIT_S))
        return state_of(future) if future.done() else {"state": "pending", "queue": trainer.queue.place(id)}

    @app.delete("/operations/{id}")
    def cancel(id: str) -> dict[str, Any]:
        """Cancel an operation; a running one stops between two microbatches, if it can stop."""
        trainer.queue.cancel(id)
        return {"operation": id}

    return app


def state_of(future: Future[Any]) -> dict[str, Any]:
    """Return the answer for a finished operation."""
    error = future.exception()
    if error is None:
        return {"state": "done", "result": future.result()}
    state = "cancelled" if isinstance(error, Cancelled) else "failed"
    if not isinstance(error, GraftworkError):
        return {"state": state, "kind": "ServiceError", "error": f"The trainer failed: {error!r}."}
    return {"state": state, **_error_fields(error)}


def _error_fields(error: GraftworkError) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": type(error).__name__, "error": str(error)}
    if isinstance(error, Busy):
        fields |= {"retry_after_s": error.retry_after_s, "queue": error.queue}
    return fields


async def _answer_error(_: Any, error: GraftworkError) -> JSONResponse:
    # 503, not 429: the queue is full for every session, not for one client.
    status = ServiceError.status if isinstance(error, Busy) else error.status
    # Whole seconds (RFC 9110, section 10.2.3).
    headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, Busy) else None
    return JSONResponse(_error_fields(error), status, headers)


async def _answer_invalid(request: Any, error: RequestValidationError) -> JSONResponse:
    """Answer an invalid body; FastAPI's field paths begin with `body`, which is left out."""
    faults = (f"`{'.'.join(map(str, one['loc'][1:]))}`: {one['msg']}." for one in error.errors())
    return await _answer_error(request, ConfigError(f"The request is not valid. {' '.join(faults)}"))


def load_trainer(params: Params, ranks: "Ranks | None" = None) -> "Trainer":
    """Load the base, open the catalog, and return a trainer without sessions.

    On a GPU it prints the memory plan first and raises `ConfigError` when the plan does not fit. With `ranks`
    this is rank 0, and the base is sharded.
    """
    import torch

    from engine.catalog.opening import open_catalog
    from engine.publishing.foreign import read_tensors
    from engine.shared_cores import SharedCores
    from engine.training.service.export import Exporter
    from engine.training.service.sessions import FREE_SHARE
    from engine.training.service.trainer import Trainer

    # The plan is of a GPU with trainer and engine, each with the whole base.
    plan, cuda = None if ranks else planned(params), cuda_bytes() is not None
    info = ensure_base(params.base, params.paths)
    catalog = open_catalog(params.paths, migrated=True)
    catalog.bases.register(info, params.base.text_digest)
    dtype = getattr(torch, params.engine.dtype_on(cuda))
    exporter = Exporter(params, catalog, dtype, end_tokens(info.path), info.text_digest)
    base = load_part(params, info, ranks) if ranks else load_base(params, info.path, plan)
    on_gpu = plan.trainer_adapters if plan else 0
    free = torch.cuda.mem_get_info(base.device)[0] if ranks and cuda else free_bytes()
    session_bytes = on_gpu or int(free * FREE_SHARE)
    shares = not (plan or ranks) and takes_all_cores(base_config(params.base, params.paths), params)
    cores = SharedCores(params.paths.cores, "trainer", threads_of(params)) if shares else None
    return Trainer(params, base, info.digest, exporter, session_bytes, cores, read_tensors)


def threads_of(params: Params, processes: int = 1) -> int:
    """Return the threads of a pass beside an engine that computes: as set, or half of the cores.

    That many `processes` of this machine share the half.
    """
    return params.trainer.threads or max(1, len(os.sched_getaffinity(0)) // 2 // processes)


def load_base(params: Params, path: Path, plan: "MemoryPlan | None") -> "ResidentBase":
    """Load the base on the configured device: float32 on a CPU, the engine's dtype on a GPU."""
    import torch

    from engine.training.model.lora import ResidentBase

    device = trainer_device(params, plan is not None)
    if plan and device != "cpu":
        # The trainer fails before the engine runs out of memory.
        torch.cuda.set_per_process_memory_fraction(plan.trainer_share)
    return ResidentBase(*arguments_of(params, path, threads_of(params), device))


def arguments_of(params: Params, path: Path, threads: int, device: str) -> tuple[Any, ...]:
    """Return what a resident base on this device is given."""
    import torch

    from engine.training.model.experts import slotted_experts

    trainer, cuda = params.trainer, device != "cpu"
    tokens, dtype = trainer.most_tokens, getattr(torch, params.engine.dtype_on(cuda))
    if not cuda:
        tokens = microbatch_tokens(json.loads((path / "config.json").read_text()), params)
        dtype = torch.float32
    # The same value as in the memory plan.
    longest = max(trainer.most_tokens, params.engine.max_model_len)
    return path, threads, tokens, device, dtype, trainer.checkpoints_on(cuda), longest, slotted_experts


def load_part(params: Params, info: BaseInfo, ranks: "Ranks") -> "ShardedBase":
    """Load this rank's part of the base, on the GPU of its number on its machine if there is one.

    Raises `ConfigError` on every rank when one has another base or version.
    """
    from engine.training.model.sharded import ShardedBase

    parts = ranks.every((info.digest, code_version()))
    for number, (digest, version) in enumerate(parts):
        if parts[0] != (digest, version):
            raise ConfigError(
                f"Rank {number} has the base {digest[:12]} and Graftwork {version}, rank 0 has "
                f"{parts[0][0][:12]} and {parts[0][1]}. Give all ranks the same base and version."
            )
    device = "cpu" if cuda_bytes() is None else f"cuda:{ranks.place}"
    return ShardedBase(ranks, *arguments_of(params, info.path, threads_of(params, ranks.near), device))


def join(params: Params) -> "Ranks | None":
    """Return this process's place among the ranks that a launcher such as torchrun has started, else None.

    Raises `ConfigError` when the launcher's variables are not complete.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    missing = [name for name in LAUNCHER if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but not {' and '.join(missing)}. Start the "
            "ranks with torchrun, or unset WORLD_SIZE for a trainer of one process."
        )
    die_with_parent(os.getppid())
    from engine.training.model.ranks import Ranks

    cuda = cuda_bytes() is not None
    if cuda and trainer_device(params, cuda) == "cpu":
        raise ConfigError(
            "trainer.device is cpu, but the ranks of a machine with GPUs train on these. Remove the setting, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        )
    place, near = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Ranks(OPERATION_S, cuda, place, near)


def main() -> None:
    """Run the trainer, or a rank of it, until it is stopped."""
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", required=True, type=Path, help="resolved settings (YAML or JSON)")
    params = load_params(parser.parse_args().params)
    set_up(params.log_format)
    os.environ.update(equal_bits(os.environ))
    # On shared cores the engine's short requests go before long training steps.
    os.nice(NICENESS)
    here = params.listener("trainer")
    try:
        ranks = join(params)
        listener = None if ranks and ranks.number else bind(here, "trainer")
    except GraftworkError as error:
        parser.exit(error.exit_code, f"{error}\n")
    if ranks and not listener:
        with lean_imports():
            part = load_part(params, ensure_base(params.base, params.paths), ranks)
        part.follow()
        return
    with lean_imports():
        trainer = load_trainer(params, ranks)
    if ranks:
        ranks.lead()
    app = guarded(make_app(trainer), here, credential(params.paths, "trainer"))
    config = uvicorn.Config(app, access_log=False, log_config=None, **server_options(here))
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener] if listener else None)
    trainer.close()
    if ranks:
        ranks.close()


if __name__ == "__main__":
    main()
