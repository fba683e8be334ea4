"""Settings of the Tinker API: off by default; enabled, it is a service and changes the default rank."""

from pathlib import Path

import pytest

from engine.services.lifecycle import services
from engine.settings.params import load_params


@pytest.mark.parametrize(
    ("text", "rank", "starts"),
    [
        ("{}", 8, False),
        ("tinker: {enabled: false}", 8, False),
        ("tinker: {enabled: true}", 32, True),
        ("{tinker: {enabled: true}, engine: {max_rank: 16}}", 16, True),
        ("{tinker: {enabled: true}, engine: {slots: 3}}", 32, True),
        ("{tinker: {enabled: true, at: 'https://elsewhere'}}", 32, False),
    ],
)
def test_the_face_is_a_service_where_it_is_enabled(
    tmp_path: Path, text: str, rank: int, starts: bool
) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(text)
    params = load_params(file)
    assert params.engine.max_rank == rank
    assert any(one.name == "tinker" for one in services(params)) == starts
    # What services read is written from the settings, and says the same.
    again = tmp_path / "params.json"
    again.write_text(params.to_json())
    assert load_params(again).engine == params.engine
