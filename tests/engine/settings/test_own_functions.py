"""Which modules a `python:` verifier or loss may come from."""

import pytest

from engine.errors import ConfigError
from engine.settings.own_functions import refuse_unlisted

LISTED = ("examples", "rules.mine")


@pytest.mark.parametrize(
    "name", ["exact", "dapo", "python:examples:a", "python:examples.verifier:judge", "python:rules.mine:a"]
)
def test_a_listed_module_passes(name: str) -> None:
    refuse_unlisted("verifier", name, LISTED)


@pytest.mark.parametrize(
    "name", ["python:os:system", "python:examples2:a", "python:rules:a", "python:rules.mine2:a"]
)
def test_any_other_is_refused_with_the_setting_to_change(name: str) -> None:
    with pytest.raises(ConfigError, match="python_modules"):
        refuse_unlisted("loss", name, LISTED)
    with pytest.raises(ConfigError):
        refuse_unlisted("loss", "python:examples:a", ())
