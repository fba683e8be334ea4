"""Progress of a base's build, as a callback and as a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, float], None]


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """Show a progress bar during a build; it appears with the first step, so not for an existing base."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns) as bar:
        task = bar.add_task(f"building {name}", visible=False)

        def update(step: int, steps: int, loss: float) -> None:
            text = f"building {name}, loss {loss:.3f}"
            bar.update(task, description=text, completed=step, total=steps, visible=True)

        yield update
