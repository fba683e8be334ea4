"""Finds training questions that are frozen items, or nearly: a score on a trained question means nothing."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from engine.errors import ConfigError

# Numbers and words whole, and each sign that a calculation or a pattern may hang on. Other punctuation goes.
PARTS = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|[^\w\s.,;:!?\"'“”‘’]")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
LENGTH = 5
# The similarity of Lee et al. (2022, https://arxiv.org/abs/2107.06499), there of 5-grams of tokens. A typo
# in 45 characters is nearly the same, and another word in fewer than 80 is not.
NEAR = 0.8
# Shingles that two near questions may differ in, on both sides together: a typo has 10, a short word a few
# more. In a long text with a passage in front, a fifth is another question.
MOST_DIFFERENT = 20
# A shingle of more frozen items belongs to their template.
TEMPLATE = 2


class QuestionLine(NamedTuple):
    """A question with its answer, and the name by which an error calls it."""

    name: str
    question: str
    answer: str


def normalised(text: str) -> str:
    """Return a text without case, white space and the punctuation of sentences; of these alone, itself."""
    return " ".join(PARTS.findall(unicodedata.normalize("NFKC", text).casefold())) or text


def refuse_leaks(training: Iterable[QuestionLine], frozen: Iterable[QuestionLine]) -> None:
    """Raise `ConfigError` for a training question that is a frozen one in `normalised` form, or nearly.

    Both have the same answer, and a near one the same numbers in the same order: `2 + 3` and `2 + 4` are
    different. The Jaccard similarity of its 5-grams is at least `NEAR`, with those of a template that frozen
    items share and without: two fillings of a long template are different, too. No more than
    `MOST_DIFFERENT` of them differ.
    """
    index = _Index(frozen)
    found = [(line, item) for line in training if (item := index.find(line))]
    if found:
        line, item = found[0]
        raise ConfigError(
            f"{line.name} is {item.name}, or nearly: {line.question[:80]!r} and {item.question[:80]!r}. "
            f"There are {len(found)} such lines. Remove them: a score on a trained question means nothing."
        )


class _Index:
    """Frozen items by their question, and by the rarer half of their shingles outside templates.

    A near question lacks at most a fifth of an item's shingles, so it has three fifths of that half: hardly
    another one has (a prefix filter, Chaudhuri et al., 2006, https://doi.org/10.1109/ICDE.2006.9).
    """

    def __init__(self, frozen: Iterable[QuestionLine]):
        self._frozen = list(frozen)
        texts = [normalised(line.question) for line in self._frozen]
        answers = [normalised(line.answer) for line in self._frozen]
        self._same = dict(zip(zip(texts, answers, strict=True), self._frozen, strict=True))
        self._shingles = list(map(_shingles, texts))
        counts = Counter(one for shingles in self._shingles for one in shingles)
        self._template = {one for one, count in counts.items() if count > TEMPLATE}
        self._near: dict[tuple[str, ...], dict[str, list[int]]] = {}
        self._own = [shingles - self._template for shingles in self._shingles]
        for number, shingles in enumerate(self._own):
            rarer = sorted(shingles, key=lambda one: (counts[one], one))[: _half(shingles)]
            key = (answers[number], *NUMBER.findall(texts[number]))
            by_shingle = self._near.setdefault(key, defaultdict(list))
            for one in rarer:
                by_shingle[one].append(number)

    def find(self, line: QuestionLine) -> QuestionLine | None:
        """Return the frozen item that a training question gives away."""
        text, answer = normalised(line.question), normalised(line.answer)
        if same := self._same.get((text, answer)):
            return same
        if not (by_shingle := self._near.get((answer, *NUMBER.findall(text)))):
            return None
        shingles = _shingles(text)
        hits = Counter(number for one in by_shingle.keys() & shingles for number in by_shingle[one])
        for number, count in sorted(hits.items()):
            lacking = _half(self._own[number]) - count
            if lacking <= (1 - NEAR) * len(self._own[number]) and self._is_near(shingles, number):
                return self._frozen[number]
        return None

    def _is_near(self, shingles: set[str], number: int) -> bool:
        is_near = _jaccard(shingles, self._shingles[number]) >= NEAR
        is_near = is_near and len(shingles ^ self._shingles[number]) <= MOST_DIFFERENT
        return is_near and _jaccard(shingles - self._template, self._own[number]) >= NEAR


def _half(shingles: set[str]) -> int:
    return (len(shingles) + 1) // 2


def _shingles(text: str) -> set[str]:
    return {text[start : start + LENGTH] for start in range(max(1, len(text) - LENGTH + 1))}


def _jaccard(first: set[str], second: set[str]) -> float:
    return len(first & second) / max(1, len(first | second))
