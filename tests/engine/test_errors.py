"""The tree of errors: exit code and HTTP status of each class, and the way back from a status."""

import inspect

import pytest

from engine import errors
from engine.errors import Busy, ConfigError, GraftworkError, ServiceError, of_status

# As the docstring draws it.
TABLE = {
    "GraftworkError": (1, 500),
    "ConfigError": (2, 400),
    "Unauthorized": (2, 401),
    "Forbidden": (2, 403),
    "BaseModelError": (3, 500),
    "AdapterError": (4, 422),
    "EffectError": (4, 422),
    "DamagedBytes": (4, 422),
    "NotFound": (5, 404),
    "Conflict": (6, 409),
    "Ambiguous": (6, 409),
    "Moved": (6, 409),
    "Purged": (6, 409),
    "Cancelled": (6, 409),
    "Gone": (1, 410),
    "ServiceError": (7, 503),
    "NotRunning": (7, 503),
    "PortInUse": (7, 503),
    "MissingBytes": (7, 503),
    "Busy": (7, 429),
    "LimitReached": (7, 429),
}
KINDS = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, GraftworkError)
}


def test_each_class_has_its_exit_code_and_status_and_the_docstring_says_so() -> None:
    assert {name: (kind.exit_code, kind.status) for name, kind in KINDS.items()} == TABLE
    lines = [line.strip(" │├└─").split() for line in str(errors.__doc__).splitlines()]
    drawn = {words[0]: tuple(words[1:3]) for words in lines if words and words[0] in TABLE}
    assert drawn.pop("GraftworkError") == ("exit", "code")
    assert drawn == {
        name: (str(code), str(status)) for name, (code, status) in TABLE.items() if name != "GraftworkError"
    }


@pytest.mark.parametrize("status", sorted({status for _, status in TABLE.values()} - {500}))
def test_a_status_means_the_first_class_of_the_tree_that_has_it(status: int) -> None:
    first = next(name for name, (_, known) in TABLE.items() if known == status)
    assert of_status(status) is KINDS[first]


def test_what_no_class_has_is_the_callers_fault_or_the_services() -> None:
    assert {of_status(status) for status in (405, 413, 499)} == {ConfigError}
    assert {of_status(status) for status in (302, 500, 502, 504)} == {ServiceError}
    assert str(of_status(429)("Full.")) == "Full."
    assert issubclass(Busy, ServiceError)
