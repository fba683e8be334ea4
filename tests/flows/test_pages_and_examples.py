"""Blocks of the pages and the examples, as a reader runs them on the services."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.document_blocks import RUN_UP, marked
from tests.helpers.documents import reading_order
from tests.helpers.operated import QUICKSTART, Operated, skeleton
from tests.helpers.repository import ROOT

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path",
    [path for path in reading_order() if marked(path, RUN_UP) and path != QUICKSTART],
    ids=lambda path: path.stem,
)
def test_blocks_of_a_page_run_on_the_services(
    people: Operated, finished: dict[str, Any], quickstart: str, path: Path, tmp_path: Path
) -> None:
    """Those of docs/quickstart.md run in the fixture. Pages ask its policy and the main job's."""
    people.page(path, tmp_path)


@pytest.fixture(scope="module")
def own_policy(people: Operated) -> str:
    """What the example of a policy of one's own prints; others ask and schedule its policy."""
    return people.example("own_policy.sh")


@pytest.mark.parametrize(
    "name",
    ["own_policy.sh", "verifier.py", "custom_loss.py", "import_peft.py", "openai_client.py", "nightly.py"],
)
def test_an_example_prints_what_is_beside_it(people: Operated, own_policy: str, name: str) -> None:
    said = own_policy if name == "own_policy.sh" else people.example(name)
    beside = (ROOT / "examples" / name).with_suffix(".txt").read_text()
    if name == "openai_client.py":
        # What the model answers is the CPU's rounding too.
        said, beside = ("\n".join(line.split()[0] for line in text.splitlines()) for text in (said, beside))
    assert skeleton(said) == skeleton(beside)
    assert name in (ROOT / "examples" / "README.md").read_text()
