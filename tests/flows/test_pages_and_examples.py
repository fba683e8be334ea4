"""Blocks of the pages and the examples, as a reader runs them on the services."""

from pathlib import Path

import pytest
import yaml

from engine.settings.params import served_name
from tests.helpers.document_blocks import RUN_UP, marked
from tests.helpers.documents import reading_order
from tests.helpers.operated import QUICKSTART, Operated, graftwork, skeleton
from tests.helpers.repository import ROOT

pytestmark = [pytest.mark.heavy(minutes=9), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def adapted_at_once(people: Operated) -> tuple[str, ...]:
    """Two policies that one command has adapted at the same time."""
    names = "arithmetic", "sorting"
    data = yaml.safe_load(people.settings.read_text())
    for name in names:
        data["policies"][name] |= {"steps": 2}
    settings = people.state / "two.yaml"
    settings.write_text(yaml.safe_dump(data))
    done = graftwork("adapt", "--policy", names[0], "--policy", names[1], settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return names


@pytest.fixture(scope="module")
def champion_of_the_pages(people: Operated, adapted_at_once: tuple[str, ...]) -> None:
    """A champion of `arithmetic`, which README.md asks, as `make run` leaves one."""
    version = people.mlflow.get_model_version("arithmetic", "1")
    name = served_name("arithmetic", version.tags["graftwork.digest"])
    done = people.command("promote", name, "--reason", "The pages ask it.")
    assert done.returncode == 0, done.stderr


def test_several_policies_are_adapted_at_once(people: Operated, adapted_at_once: tuple[str, ...]) -> None:
    for name in adapted_at_once:
        (version,) = people.mlflow.search_model_versions(f"name = '{name}'")
        assert version.tags["graftwork.probe"] == "accepted"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path",
    [path for path in reading_order() if marked(path, RUN_UP) and path != QUICKSTART],
    ids=lambda path: path.stem,
)
def test_blocks_of_a_page_run_on_the_services(
    people: Operated, champion_of_the_pages: None, quickstart: str, path: Path, tmp_path: Path
) -> None:
    """The fixture runs those of docs/quickstart.md; other pages ask the policy that it makes."""
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
