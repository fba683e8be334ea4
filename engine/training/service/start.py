"""Where a new session starts: at the base, at a revision, at an imported adapter, or at a fork.

A fork of a policy starts at its champion, or without one at its newest exported revision. A fork of a session
starts at its last stored step or at a named state, with or without its Adam moments. Either fork has its own
history and random state, and counts its steps from 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.adapters.revision import largest_rank, split_key, targets_of, validate
from engine.base.families import BaseShapes
from engine.errors import AdapterError, ConfigError, NotFound
from engine.training.model.adapter import Adapter, chosen_sites, ranks_at
from engine.training.model.lora import ResidentBase
from engine.training.service import state
from engine.training.service.export import Exporter
from engine.training.service.protocol import CreateSession
from engine.training.service.session import CURRENT, SHAPE, check_base, state_file

SOURCES = ("parent", "adapter", "fork", "fork_session")
# Reads the canonical tensors, in float32, of an adapter's directory in any supported layout.
ReadTensors = Callable[[Path, BaseShapes], dict[str, Tensor]]


@dataclass(frozen=True)
class Start:
    """A request with rank, alpha, targets and parent resolved, and the adapter's initial tensors."""

    opened: CreateSession
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    stored: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def fill(self, adapter: Adapter) -> None:
        """Initialise a fresh adapter; ranks beyond the source's keep their random A and zero B."""
        if self.stored:
            adapter.load_state_dict(self.stored["adapter"], self.opened.fork_moments)
        adapter.place(self.tensors)


def start_of(
    request: CreateSession,
    base: ResidentBase,
    base_digest: str,
    exporter: Exporter,
    sessions: Path,
    read_tensors: ReadTensors | None = None,
) -> Start:
    """Find where a new session starts; `read_tensors` reads the directory of an imported adapter.

    Raises `ConfigError` for more than one source or missing settings, `NotFound` for a source that does not
    exist, and `AdapterError` that names a tensor for which the session has no place.
    """
    if request.seed is None:
        raise ConfigError("A new session needs a `seed`.")
    given = [name for name in SOURCES if getattr(request, name)]
    if len(given) > 1:
        raise ConfigError(f"A session starts at one source, not at {' and '.join(given)}. Give one of them.")
    if request.fork_state and not request.fork_session:
        raise ConfigError("The state `fork_state` needs the session that has it. Give `fork_session` too.")
    if request.fork_session:
        return _fork_of_session(request, base_digest, sessions / request.fork_session)
    if request.adapter:
        assert read_tensors, "this trainer reads no adapters of others"
        return _fitted(request, read_tensors(Path(request.adapter), base.shapes), base)
    policy = request.fork or request.parent_policy or request.policy
    if digest := _newest(exporter, policy) if request.fork else request.parent:
        opened = request.model_copy(update={"parent": digest})
        return _fitted(opened, exporter.parent_tensors(policy, digest), base)
    if request.rank is None or not request.targets:
        raise ConfigError("A session that starts at the base needs `rank` and `targets`.")
    return Start(request.model_copy(update={"alpha": request.alpha or float(request.rank)}))


def _newest(exporter: Exporter, policy: str) -> str:
    """Return the digest of a policy's champion, or of its newest exported revision."""
    catalog = exporter.catalog
    if champion := catalog.routes.get(policy).champion:
        return champion
    exported = (row.digest for row in catalog.revisions.page(policy) if row.state == "exported")
    if newest := next(exported, None):
        return newest
    raise NotFound(
        f"Policy {policy!r} has no exported revision to fork. Train it first, or start at the base."
    )


def _fork_of_session(request: CreateSession, base_digest: str, directory: Path) -> Start:
    """Start at another session's last stored step or named state, with its rank, alpha and targets."""
    file = state_file(directory, request.fork_state or CURRENT)
    if not file.exists():
        named = f" with a state {request.fork_state!r}" if request.fork_state else ""
        raise NotFound(f"There is no session {directory.name!r}{named} to fork.")
    stored = state.read(file)
    check_base(directory.name, stored, base_digest)
    settings = {name: stored["settings"][name] for name in SHAPE}
    for name, value in settings.items():
        wanted = getattr(request, name)
        if wanted is not None and (sorted(wanted) if name == "targets" else wanted) != value:
            raise ConfigError(
                f"A fork of the session {directory.name!r} keeps its {name}, {value}. Leave {name} out."
            )
    return Start(request.model_copy(update={**settings, "parent": stored["parent"]}), stored=stored)


def _fitted(request: CreateSession, tensors: dict[str, Tensor], base: ResidentBase) -> Start:
    """Start at canonical tensors: omitted settings are taken from them, given ones must fit them."""
    validate(tensors, None, base.modules)
    modules = {split_key(key)[0] for key in tensors}
    largest = largest_rank(tensors)
    targets = request.targets or list(targets_of(tensors))
    rank = request.rank or largest
    if largest > rank:
        raise AdapterError(
            f"The adapter has rank {largest}, over this session's {rank}. Raise `rank`, or leave it out."
        )
    chosen = chosen_sites(base.sites, targets)
    places = {split_key(key)[0] for site in chosen.values() for key in site.keys("lora_A")}
    if outside := sorted(modules - places):
        raise AdapterError(
            f"The adapter has factors at {outside[0]}, where this session trains nothing. Add "
            f"{outside[0].rpartition('.')[2]} to `targets`, or leave them out."
        )
    alpha = request.alpha or float(rank)
    update = {"rank": rank, "alpha": alpha, "targets": targets}
    if request.rank is None and request.ranks is None and request.alphas is None:
        # Each module keeps its own rank and scale: none is padded to the largest.
        other = {f"^{name}": own for name, own in ranks_at(chosen, tensors).items() if own != rank}
        update |= {"ranks": other, "alphas": {name: own * alpha / rank for name, own in other.items()}}
    return Start(request.model_copy(update=update), tensors)
