"""A base that is built here by a recipe."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.base.progress import Progress
from engine.base.toys.recipes import RECIPES, Recipe
from engine.problems.procedural import PHRASINGS, TASKS
from engine.settings.params import content_hash

# What a base is drawn and trained with.
SEED = 20260513


@dataclass(frozen=True)
class ToyBase:
    """The base of the recipe `name`."""

    name: str

    @property
    def directory(self) -> str:
        """The name of its directory."""
        return f"{self.name}-{recipe_digest(RECIPES[self.name], SEED)[:12]}"

    def config(self) -> dict[str, Any]:
        """Return its `config.json` without a build."""
        return RECIPES[self.name].config()

    def make(self, directory: Path, progress: Progress) -> None:
        """Build it in an empty directory."""
        # Only a build needs torch.
        from engine.base.toys.build import build

        build(RECIPES[self.name], SEED, directory, progress)


def recipe_digest(recipe: Recipe, seed: int) -> str:
    """Return the hash of everything that determines a base: recipe, seed and training problems."""
    tasks = {name: [task.dataset, task.settings] for name, task in TASKS.items()}
    return content_hash([asdict(recipe), seed, tasks, PHRASINGS])
