"""What scores on all items of a suite say, as estimates in the ledger: of the suite, and of the task."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import fmean

from engine.ledger.estimates import Estimate, emit_estimate
from engine.ledger.sender import open_spool
from engine.quality.estimate import interval, paired_difference
from engine.settings.params import Params


def emit_means(
    params: Params, row: Estimate, scores: Sequence[float], segments: Sequence[str], run: str
) -> None:
    """Emit the mean of all items and of each segment, with what else `row` says; idempotent in `run`."""
    by_segment: dict[str | None, list[float]] = defaultdict(list)
    for score, segment in zip(scores, segments, strict=True):
        by_segment[None].append(score)
        if segment:
            by_segment[segment].append(score)
    _emit(
        params,
        [
            estimate
            for segment, values in by_segment.items()
            for estimate in _both(replace(row, segment=segment), values, interval(values))
        ],
        run,
    )


def emit_difference(
    params: Params, row: Estimate, mine: Sequence[float], theirs: Sequence[float], run: str
) -> None:
    """Emit the difference of scores to those of `row.against` on the same items; idempotent in `run`."""
    gains = [own - other for own, other in zip(mine, theirs, strict=True)]
    _, low, high = paired_difference(mine, theirs)
    _emit(params, list(_both(row, gains, (low, high))), run)


def _both(row: Estimate, values: Sequence[float], of_task: tuple[float, float]) -> Iterator[Estimate]:
    """Yield the exact mean of the suite's items, and the interval of the task that they are a sample of."""
    mean, count = fmean(values), len(values)
    exact = replace(row, target="suite", mean=mean, low=mean, high=mean, items=count, available=count)
    yield exact
    yield replace(exact, target="task", low=min(mean, of_task[0]), high=max(mean, of_task[1]))


def _emit(params: Params, estimates: list[Estimate], run: str) -> None:
    with closing(open_spool(params, "score")) as spool:
        for estimate in estimates:
            emit_estimate(spool, estimate, run)
