"""Lines of revisions with the outcome of each on the same items: recorded ones, and simulated ones.

A recorded line is a family of problems. Its revisions are adapters on `tiny-dense`, trained by cross entropy
since GRPO on a base of this size learns style: half-trained ones, mixtures with another family, decoys that
learned wrong answers, and what was trained on. An outcome is whether the greedy answer is right, for 20,000
fresh items. They are packed in `quality_outcomes.npz`, which the long form writes; the short form replays it.

Shapes: `_R` revisions, `_N` items.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_name("quality_outcomes.npz")
ITEMS = 20_000
Outcomes = NDArray[np.bool_]


@dataclass(frozen=True)
class Line:
    """The revisions of one family, oldest first; the first is the base.

    `segments` has the number of items of each segment, in whose order the items are. `parents` are places in
    `revisions`, that of the base being -1.
    """

    family: str
    segments: tuple[int, ...]
    revisions: tuple[str, ...]
    parents: tuple[int, ...]
    outcomes_RN: Outcomes

    @property
    def segment_of_items(self) -> NDArray[np.int64]:
        """Return each item's segment."""
        return np.repeat(np.arange(len(self.segments)), self.segments)

    def is_best_yet(self, revision: int) -> bool:
        """Whether a revision is better than every earlier one."""
        means = self.outcomes_RN.mean(axis=1)
        return bool(means[revision] > means[:revision].max())


def save(lines: Sequence[Line], file: Path = FILE) -> None:
    """Write lines to a file, eight outcomes a byte."""
    arrays = {}
    for line in lines:
        arrays |= {
            f"{line.family}/segments": np.array(line.segments),
            f"{line.family}/revisions": np.array(line.revisions),
            f"{line.family}/parents": np.array(line.parents),
            f"{line.family}/outcomes": np.packbits(line.outcomes_RN, axis=1),
        }
    np.savez_compressed(file, **arrays)


def load(file: Path = FILE) -> list[Line]:
    """Return the recorded lines."""
    with np.load(file) as arrays:
        return [_loaded(arrays, name.partition("/")[0]) for name in arrays if name.endswith("/segments")]


def _loaded(arrays: np.lib.npyio.NpzFile, family: str) -> Line:
    segments, revisions, parents, packed = (
        arrays[f"{family}/{part}"] for part in ("segments", "revisions", "parents", "outcomes")
    )
    outcomes_RN = np.unpackbits(packed, axis=1, count=int(segments.sum())).astype(bool)
    return Line(
        family, tuple(segments.tolist()), tuple(revisions.tolist()), tuple(parents.tolist()), outcomes_RN
    )


def simulated(families: int, seed: int) -> Iterator[Line]:
    """Yield lines whose truth is known by construction.

    An item has a difficulty, a segment shifts it, and a revision has an ability, a taste for each segment,
    and luck of its own with each item. The last revision of a line is better than all before it.
    """
    random = np.random.default_rng(seed)
    for number in range(families):
        kinds = int(random.integers(2, 7))
        sizes = random.multinomial(ITEMS - 100 * kinds, random.dirichlet(np.full(kinds, 4.0))) + 100
        segment_N = np.repeat(np.arange(kinds), sizes)
        of_segment = random.normal(0, 1, kinds)
        difficulty_N = random.normal(0, random.uniform(1, 3), ITEMS) + of_segment[segment_N]
        luck = random.uniform(0.2, 1.0)
        abilities = (-3.0, *random.uniform(-1, 0.5, 3), 1.5)
        outcomes_RN = np.stack([
            difficulty_N + random.normal(ability, 0.4, kinds)[segment_N] + random.normal(0, luck, ITEMS) > 0
            for ability in abilities
        ])  # fmt: skip
        names = ("base", "first", "second", "third", "best")
        yield Line(f"simulated-{number}", tuple(sizes.tolist()), names, (-1, 0, 1, 2, 3), outcomes_RN)
