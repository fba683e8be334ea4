"""Progress of a base's build or conversion: a callback of (step, steps, note), and a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """Show a progress bar while a base is made; it appears with the first step."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns) as bar:
        task = bar.add_task(f"building {name}", visible=False)

        def update(step: int, steps: int, note: str) -> None:
            text = f"building {name}, {note}"
            bar.update(task, description=text, completed=step, total=steps, visible=True)

        yield update
