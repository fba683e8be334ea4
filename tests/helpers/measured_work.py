"""What some work costs: a step of a session's journal, wasteful code, lists; for a process of its own.

Each function imports what it measures: the process starts for it alone.
"""

import os
from pathlib import Path

from tests.helpers.own_process import Work, peak_of, work_of

RECORD = {"reward": 0.5, "masked": {"outlier": 3}, "text": "x" * 500}


def work_of_steps(root: Path, early: int, late: int) -> tuple[Work, Work, int, str]:
    """Write `late` steps; return the work of an early one and of the last, the journal's size and last id."""
    from engine.training.service.state import Journal

    os.fsync = lambda _: None
    journal, last, found = Journal(root), None, {}

    def step(number: int) -> None:
        nonlocal last
        result = {"step": number, "grad_norm": 0.5}
        last = journal.append(last, id=f"{number:06d}", result=result, row={**RECORD, **result})
        journal.flush()
        journal.commit()

    for number in range(1, late + 1):
        if number in (early, late):
            found[number] = work_of(lambda number=number: step(number))
        else:
            step(number)
    return found[early], found[late], journal.size, last


def work_of_waste(file: Path, waste: str, sizes: tuple[int, int]) -> list[Work]:
    """Return the work of code that `rewrites`, `reads` or `keeps` all that came before, for each size."""
    kept, found = [RECORD] * max(sizes), []
    for size in sizes:

        def act(size: int = size) -> None:
            if waste == "rewrites":
                file.write_bytes(b"x" * size)
            elif waste == "reads":
                file.read_bytes()
            else:
                str(kept[:size])

        file.write_bytes(b"x" * size)
        found.append(work_of(act))
    return found


def peak_of_reading(file: Path, rows: int) -> int:
    """Read a file of data with so many rows; return the most bytes that were held."""
    from engine.problems.readers import read_file

    def read() -> None:
        assert sum(1 for _ in read_file(file)) == rows

    return peak_of(read)


def peak_of_pages(url: str, policy: str | None, rows: int) -> int:
    """List so many revisions page by page; return the most bytes that were held."""
    from engine.catalog.catalog import Catalog
    from tasks.adapters import pages

    with Catalog(url) as catalog:

        def turn() -> None:
            assert sum(1 for page in pages(catalog, policy) for _ in page) == rows

        return peak_of(turn)
