"""Which line of training a policy's settings continue.

A line continues from the policy's champion while its task and contract stay the same. With another contract
it starts at the policy's `start`, or at the base.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.adapters.manifests import stored_manifest
from engine.errors import NotFound
from engine.settings.params import DIGEST12, Paths, content_hash
from engine.settings.policies import PolicyConfig

if TYPE_CHECKING:
    from engine.catalog.catalog import Catalog

# Settings that may change within one line of training.
NOT_OF_A_LINE = {
    "steps", "suite", "scheduled", "max_age_s", "drift_after_s", "owner", "collapse", "general",
    "recheck", "recheck_after_s", "keeps", "score_reads",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of training: its session's name, its parent revision, its seed, and its LoRA targets.

    `parent_policy` is the parent's, None for the line's own.
    """

    session: str
    parent: str | None
    seed: int
    targets: tuple[str, ...]
    parent_policy: str | None = None


def line_of(paths: Paths, policy: str, config: PolicyConfig, targets: Sequence[str]) -> Line:
    """Return the line of training that these settings continue; `targets` are the servable projections.

    The line's name is a hash of the settings, the champion and the number of releases that failed against
    it. A killed run therefore finds its line again, and a policy whose revision was promoted or refused
    since then starts a new line with a new seed. Raises `NotFound` where there is no revision `config.start`.
    """
    from engine.catalog.catalog import Catalog

    with Catalog(paths.catalog_url) as catalog:
        champion, refused = _standing(catalog, policy)
        settings = config.model_dump(mode="json", exclude=NOT_OF_A_LINE, exclude_defaults=True)
        if config.data_digest:
            # The data's hash: the file's location must not change the line.
            settings["task"] = config.data_digest
        name = content_hash([settings, champion, refused])
        targets = config.targets or tuple(targets)
        seed = int(name[:8], 16) >> 1 if champion or refused else config.seed
        session = f"{policy}-{name[:DIGEST12]}"
        if champion and _continues(paths, policy, champion, config, targets):
            return Line(session, champion, seed, targets)
        start, _, digest = (config.start or "").partition("@")
        parent = catalog.revisions.get(start, digest).digest if start else None
        return Line(session, parent, seed, targets, start or None)


def _standing(catalog: "Catalog", policy: str) -> tuple[str | None, int]:
    """Return the champion and the number of releases that failed against it."""
    try:
        champion = catalog.routes.get(policy).champion
    except NotFound:
        return None, 0
    ended = [release for release in catalog.releases.all(policy) if release.baseline == champion]
    return champion, sum(release.state in ("held", "rolled_back") for release in ended)


def _continues(
    paths: Paths, policy: str, champion: str, config: PolicyConfig, targets: Sequence[str]
) -> bool:
    manifest = stored_manifest(paths.revision(policy, champion))
    if not manifest or sorted(manifest["targets"]) != sorted(targets):
        return False
    before, now = manifest["config"], config.model_dump(mode="json")
    # A policy with new data continues from its champion.
    same = ("contract", "verifier", "system", "few_shot", "rank")
    names = same if config.data_digest else ("task", *same)
    return all(before.get(name, now[name]) == now[name] for name in names)
