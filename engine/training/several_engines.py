"""Rollouts by several live engines: each samples a piece of the step, that is consecutive groups.

A piece whose engine fails, drains or falls silent is cut over the other engines. Every group has its own
seed, so its tokens do not depend on which engine samples it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self

from engine.catalog.catalog import Catalog
from engine.catalog.fleet import Fleet
from engine.catalog.opening import open_catalog
from engine.errors import GraftworkError, ServiceError
from engine.settings.params import Params
from engine.threads import background
from engine.training.sample_groups import Groups, Sample, Sampling, sample_groups

# How often engines are looked up while a step waits for them.
LOOK_S = 2.0
# What `ServiceClient` waits between two attempts.
PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class Engines:
    """The engines that sample for one run: `url`, or all live ones once the catalog has several."""

    def __init__(self, catalog: Catalog, base: str, url: str):
        self._catalog, self.fleet, self._base = catalog, Fleet(catalog), base
        self._url, self._urls, self._are_several = url, [url], False

    @classmethod
    def of(cls, params: Params, base: str) -> Self | None:
        """Return the engines of an installation's catalog.

        None where it is in the state directory: it is of one machine then, which has one engine.
        """
        return cls(open_catalog(params.paths), base, params.url("engine")) if params.catalog.url else None

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    def sample(self, key: str, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """Return what `sample_over` returns, of those that are live."""
        if self.urls() == [self._url]:
            return sample_groups(self._url, key, model, prompts, sampling)
        return sample_over(self.urls, key, model, prompts, sampling)

    def urls(self) -> list[str]:
        """Return the live engines' URLs, at least one; while the catalog is unreadable, the last ones."""
        try:
            rows = self.fleet.live()
        except ServiceError:
            return self._urls
        urls = list(dict.fromkeys(row.url for row in rows if row.base == self._base and not row.draining))
        self._are_several = self._are_several or len(urls) > 1
        if self._are_several and urls:
            self._urls = urls
        return self._urls


@dataclass
class _Piece:
    """Groups `start` to `end`, the errors of engines asked for them, and since when all have failed."""

    start: int
    end: int
    errors: dict[str, GraftworkError] = field(default_factory=dict)
    failing_since: float | None = None
    pause_s: float = PAUSE_S


def sample_over(
    engines: Callable[[], Sequence[str]],
    key: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    look_s: float = LOOK_S,
) -> Groups:
    """Return what `sample_groups` returns, sampled by all of `engines()`.

    An engine that refuses a piece for good is not asked for it again. Raises its error once every live engine
    has refused, and `ServiceError` when all engines have failed for `patience_s`.
    """

    def ask(url: str, start: int, end: int) -> Groups:
        seed = sampling.seed + start * sampling.group_size
        # A failed piece goes to another engine at once.
        mine = replace(sampling, seed=seed, patience_s=0.0)
        return sample_groups(url, key, model, prompts[start:end], mine)

    return _Step(engines, ask, sampling.patience_s, look_s).run(len(prompts))


class _Step:
    """The pieces of one step: under way, waiting for another attempt, answered."""

    def __init__(
        self,
        engines: Callable[[], Sequence[str]],
        ask: Callable[[str, int, int], Groups],
        patience_s: float,
        look_s: float,
    ):
        self._engines, self._ask, self._patience_s, self._look_s = engines, ask, patience_s, look_s
        self._ended: SimpleQueue[tuple[int, Groups | BaseException]] = SimpleQueue()
        self._groups: dict[int, list[Sample]] = {}
        # By the number of the request.
        self._requests: dict[int, tuple[_Piece, str]] = {}
        self._starts: list[int] = []
        self._waiting: list[tuple[float, _Piece]] = []

    def run(self, count: int) -> Groups:
        """Return the groups 0 to `count`."""
        self._begin(_Piece(0, count))
        looked = time.monotonic()
        while len(self._groups) < count:
            try:
                number, outcome = self._ended.get(timeout=self._next_s())
                self._take(number, outcome)
            except Empty:
                pass
            now = time.monotonic()
            if now - looked >= self._look_s:
                self._leave_silent()
                looked = now
            due = [piece for at, piece in self._waiting if at <= now]
            self._waiting = [(at, piece) for at, piece in self._waiting if at > now]
            for piece in due:
                self._begin(piece)
        return [self._groups[number] for number in range(count)]

    def _next_s(self) -> float:
        first = min((at for at, _ in self._waiting), default=float("inf"))
        return max(0.0, min(self._look_s, first - time.monotonic()))

    def _begin(self, piece: _Piece) -> None:
        """Cut a piece over the live engines that have not failed on it; without one, wait or give up."""
        live = self._engines()
        able = [url for url in live if url not in piece.errors]
        if not able:
            self._pause(piece, live)
            return
        size, more = divmod(piece.end - piece.start, len(able))
        start = piece.start
        for place, url in enumerate(able):
            end = start + size + (place < more)
            if start < end:
                self._send(replace(piece, start=start, end=end, errors=dict(piece.errors)), url)
            start = end

    def _pause(self, piece: _Piece, live: Sequence[str]) -> None:
        """Ask the engines again that may answer later, unless there is none or patience is over."""
        errors = [piece.errors[url] for url in live]
        passing = {url for url in live if isinstance(piece.errors[url], ServiceError)}
        now = time.monotonic()
        piece.failing_since = piece.failing_since or now
        if not passing:
            raise errors[0]
        if now - piece.failing_since >= self._patience_s:
            raise next(error for error in errors if isinstance(error, ServiceError))
        for url in passing:
            del piece.errors[url]
        self._waiting.append((now + piece.pause_s, piece))
        piece.pause_s = min(2 * piece.pause_s, LONGEST_PAUSE_S)

    def _send(self, piece: _Piece, url: str) -> None:
        number = len(self._starts)
        self._starts.append(piece.start)
        self._requests[number] = (piece, url)
        background(partial(self._answer, number, url, piece.start, piece.end))

    def _answer(self, number: int, url: str, start: int, end: int) -> None:
        try:
            self._ended.put((number, self._ask(url, start, end)))
        except BaseException as error:
            # Raised, or answered by another engine, in the thread of the step.
            self._ended.put((number, error))

    def _take(self, number: int, outcome: Groups | BaseException) -> None:
        """Take an answer, also one that is no longer waited for; hand a failed piece on."""
        if not isinstance(outcome, BaseException):
            self._requests.pop(number, None)
            self._groups.update(enumerate(outcome, self._starts[number]))
            return
        if number not in self._requests:
            return
        piece, url = self._requests.pop(number)
        if not isinstance(outcome, GraftworkError):
            raise outcome
        self._hand_on(piece, url, outcome)

    def _hand_on(self, piece: _Piece, url: str, error: GraftworkError) -> None:
        piece.errors[url] = error
        self._begin(piece)

    def _leave_silent(self) -> None:
        """Hand on what engines were asked that drain, have left or no longer beat."""
        live = self._engines()
        for number, (piece, url) in list(self._requests.items()):
            if url not in live:
                del self._requests[number]
                error = ServiceError(f"The engine at {url} has left the catalog's live engines.")
                self._hand_on(piece, url, error)
