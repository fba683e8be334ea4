"""Readers of the files that people have: JSON lines, a JSON array, CSV, Parquet, a saved dataset.

Each yields (number, row) one by one in bounded memory. JSON lines, arrays and CSV may be compressed by gzip.
CSV is read here, not by `datasets`, whose reader makes 7 of a cell 007 and nothing of NA.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from engine.errors import ConfigError
from engine.problems.rows import COLUMNS

Rows = Iterator[tuple[int, Any]]
Bytes = gzip.GzipFile | io.BufferedReader
LINE = '{"question": "1 + 2 =", "answer": "3"}'
CSV, GZIP, PARQUET = (".csv", ".tsv"), b"\x1f\x8b", b"PAR1"
# First bytes of what people give and no reader takes, and what to do.
OTHERS = {
    b"PK\x03\x04": "a zip archive or a sheet of Excel; unpack it, or save the sheet as CSV (UTF-8)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; run `zstd -d` on it",
    b"\xff\xfe": "UTF-16; convert it by `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "UTF-16; convert it by `iconv -f UTF-16 -t UTF-8`",
    b"ARROW1": "an Arrow file; give the directory that `save_to_disk` wrote, or save it as Parquet",
    b"\xff\xff\xff\xff": "an Arrow stream; give the directory that `save_to_disk` wrote around it",
    b"SQLite": "a SQLite database; export the table as CSV",
}
# Most characters of a CSV cell or of an element of an array, and how much is read of an array at once.
LONGEST, CHUNK = 1 << 24, 1 << 20
SPACE = re.compile(r"[ \t\n\r]*")


def read_file(source: Path) -> Rows:
    """Yield (number, row) of a file or saved dataset; the number is the line, or the place from 1.

    Raises `ConfigError` with what was seen, and how to convert it, for a file that no reader takes.
    """
    if source.is_dir():
        return _dataset(source)
    if not source.is_file():
        raise ConfigError(f"There is no file {source}. Check the path.")
    with source.open("rb") as handle:
        first = handle.read(8)
    if first.startswith(PARQUET):
        return _parquet(source)
    for magic, kind in OTHERS.items():
        if first.startswith(magic):
            raise ConfigError(f"{source} is {kind}.")
    is_packed = first.startswith(GZIP)
    name = source.name.lower().removesuffix(".gz")
    return _text(source, is_packed, name.endswith(CSV))


def json_line(line: bytes, where: str) -> Any:
    """Return the value of one line of JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not valid JSON: {error}. Give one line for each problem: {LINE}."
        ) from None


def _text(source: Path, is_packed: bool, is_csv: bool) -> Rows:
    is_header = False
    try:
        with gzip.open(source) if is_packed else source.open("rb") as handle:
            for number, row in _csv(source, handle) if is_csv else _json(source, handle):
                is_header = True
                yield number, row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{source} cannot be unpacked: {error}. Copy it again.") from None
    if not is_header:
        raise ConfigError(f"{source} is empty. Give one JSON object on each line, with question and answer.")


def _json(source: Path, handle: Bytes) -> Rows:
    opening = handle.read(1024)
    handle.seek(0)
    if opening.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _array(source, handle)
        return
    for number, line in enumerate(handle, 1):
        if line.strip():
            yield number, json_line(line, f"{source}:{number}")


def _array(source: Path, handle: Bytes) -> Rows:
    """Yield the elements of a JSON array, with no more of it in memory than one of them and a chunk."""
    text, decode = io.TextIOWrapper(handle, "utf-8-sig"), json.JSONDecoder().raw_decode
    buffer, at, number = "", 0, 0
    while True:
        at = _after_space(buffer, at)
        if number and buffer[at : at + 1] == "]":
            _refuse_rest(text, buffer[at + 1 :], source, number)
            return
        try:
            # Before the first element is the opening bracket, before each other one a comma.
            if buffer[at : at + 1] != (",[")[not number]:
                raise ValueError(f"found {buffer[at : at + 1]!r} between two elements")
            start = _after_space(buffer, at + 1)
            if not number and buffer[start : start + 1] == "]":
                _refuse_rest(text, buffer[start + 1 :], source, number)
                return
            value, at = decode(buffer, start)
        except (ValueError, RecursionError) as error:
            more = _more(text, source, max(CHUNK, len(buffer) - at))
            if not more or len(buffer) - at > LONGEST:
                raise ConfigError(
                    f"Element {number + 1} of the array {source} is not valid JSON: {error}. Give one object "
                    f"for each problem: [{LINE}]."
                ) from None
            buffer, at = buffer[at:] + more, 0
            continue
        number += 1
        yield number, value


def _refuse_rest(text: IO[str], rest: str, source: Path, number: int) -> None:
    """Raise `ConfigError` where anything but white space follows an array of `number` elements."""
    while not (seen := rest.strip()):
        if not (rest := _more(text, source, CHUNK)):
            return
    raise ConfigError(
        f"{source} goes on after the `]` of its array of {number} element{'s' * (number != 1)}: "
        f"{seen[:40]!r}. Give one array, or one object on each line, which `jq -cs 'flatten(1)[]'` writes."
    )


def _after_space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def _more(text: IO[str], source: Path, size: int) -> str:
    try:
        return text.read(size)
    except UnicodeDecodeError as error:
        raise _not_utf8(source, error) from None


def _not_utf8(source: Path, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"{source} is not UTF-8: {error}. Convert it, such as by `iconv -f CP1252 -t UTF-8`.")


def _csv(source: Path, handle: Bytes) -> Rows:
    """Yield the rows of a table with a header; cells are text, and an empty one is a missing value."""
    csv.field_size_limit(LONGEST)
    with io.TextIOWrapper(handle, "utf-8-sig", newline="") as text:
        try:
            first = text.readline()
            lines = csv.reader([first], delimiter=_separator(first))
            header = [name.strip() for name in next(lines, [])]
            table = csv.reader(text, delimiter=_separator(first), strict=True)
            _refuse_header(source, header)
            after = 2
            for cells in table:
                # A quoted cell may go over several lines: the row has the number of its first one.
                number, after = after, table.line_num + 2
                if len(cells) not in (0, len(header)):
                    raise ConfigError(
                        f"{source}:{number} has {len(cells)} cells under {len(header)} columns. Put a cell "
                        'that contains the separator or a line end into "quotes".'
                    )
                if cells:
                    yield number, {name: cell or None for name, cell in zip(header, cells, strict=True)}
        except csv.Error as error:
            raise ConfigError(f"{source}:{after} is not valid CSV: {error}. Close each quote.") from None
        except UnicodeDecodeError as error:
            raise _not_utf8(source, error) from None


def _separator(header: str) -> str:
    """Return the separator that gives the header most columns that we know."""

    def known(separator: str) -> int:
        return len(COLUMNS & {name.strip().strip('"') for name in header.split(separator)})

    return max(",;\t|", key=known)


def _refuse_header(source: Path, header: list[str]) -> None:
    twice = sorted({name for name in header if header.count(name) > 1} & COLUMNS)
    if twice:
        raise ConfigError(f"{source} has the column `{twice[0]}` twice. Rename one of the two.")
    if not COLUMNS & {*header}:
        raise ConfigError(
            f"The first line of {source} names no column that is known: {', '.join(header)[:120]!r}. It "
            "must name them, such as `question,answer`."
        )


def _parquet(source: Path) -> Rows:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(source) as file:
            rows = (row for batch in file.iter_batches(1000) for row in batch.to_pylist())
            features: Mapping[str, Any] = {}
            # Left there by `datasets`, with the names of its classes.
            if b"huggingface" in (file.schema_arrow.metadata or {}):
                from datasets import Features

                features = Features.from_arrow_schema(file.schema_arrow)
            yield from _plain(source, rows, features)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{source} is not valid Parquet: {str(error)[:200]}. Write it again.") from None


def _dataset(source: Path) -> Rows:
    """Yield the rows of one split that `Dataset.save_to_disk` wrote."""
    if (source / "dataset_dict.json").is_file():
        splits = json.loads((source / "dataset_dict.json").read_text()).get("splits", [])
        raise ConfigError(
            f"{source} has the splits {', '.join(splits)}. Name one by its directory: {source / 'train'}."
        )
    if not (source / "state.json").is_file():
        seen = ", ".join(sorted(file.name for file in source.iterdir())[:6]) or "nothing"
        raise ConfigError(
            f"{source} is a directory that `datasets` did not write: it has {seen}. Give one file, or save "
            "it: datasets.load_dataset(DIRECTORY, split='train').save_to_disk(ANOTHER)."
        )
    from datasets import load_from_disk
    from pyarrow import ArrowException

    try:
        rows = load_from_disk(str(source))
        yield from _plain(source, rows, rows.features)
    except (ArrowException, OSError, KeyError) as error:
        raise ConfigError(
            f"The dataset {source} cannot be opened: {str(error)[:200]}. Save it again."
        ) from None


def _plain(source: Path, rows: Iterable[dict[str, Any]], features: Mapping[str, Any]) -> Rows:
    """Yield rows of a table whose values are what people write: 7 for 7.0, a class by its name.

    A column of whole numbers with a gap is one of floats in pandas.
    """
    names = {name: kind.int2str for name, kind in features.items() if hasattr(kind, "int2str")}
    number = 0
    for number, row in enumerate(rows, 1):
        yield number, {name: _written(value, names.get(name)) for name, value in row.items()}
    if not number:
        raise ConfigError(f"{source} has no row. Give at least 100.")


def _written(value: Any, named: Callable[[int], str] | None) -> Any:
    if named and isinstance(value, int):
        # A class of -1 is one that nobody gave.
        return named(value) if value >= 0 else None
    return int(value) if isinstance(value, float) and value.is_integer() else value
