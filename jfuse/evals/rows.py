"""Rows of local files: JSON Lines and JSON, plain or gzipped, read line by line and checked field by field.

Every error names the file and, where there are lines, the line. Nothing here opens a network connection.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar


class _Named(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_Named)
Row = dict[str, Any]


def read_rows(path: str | Path, build: Callable[[Row, int], Iterable[Item]]) -> Iterator[Item]:
    """What `build(row, line number)` makes of each line's object; blank lines are skipped.

    Raises:
        ValueError: a malformed line or an id that is there already, with the file's name and the line's number.
    """
    path, seen = Path(path), {}
    with _open(path) as file:  # bytes: lines end at a line feed only, and a bad byte is found on its line
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                row = _parse(raw, "utf-8-sig" if line == 1 else "utf-8")
                if not isinstance(row, dict):
                    raise ValueError(f"a JSON object is expected, not {type(row).__name__}.")
                built = list(build(row, line))
                for item in built:
                    if item.id in seen:
                        raise ValueError(f"id {item.id!r} is already that of line {seen[item.id]}; ids must differ.")
                    seen[item.id] = line
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {line}: {error}") from error
            yield from built


def read_first(path: str | Path) -> Any:
    """The value on a file's first line that is not blank, or None.

    Raises:
        ValueError: a malformed line, with the file's name and the line's number.
    """
    with _open(Path(path)) as file:
        for line, raw in enumerate(file, start=1):
            if raw.strip():
                try:
                    return _parse(raw, "utf-8-sig" if line == 1 else "utf-8")
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {line}: {error}") from error
    return None


def read_document(path: str | Path) -> Any:
    """The value of a file that holds one JSON value.

    Raises:
        ValueError: a malformed file, by name.
    """
    with _open(Path(path)) as file:
        try:
            return _parse(file.read(), "utf-8-sig")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error


def _open(path: Path) -> io.BufferedIOBase:
    return gzip.GzipFile(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _parse(raw: bytes, encoding: str) -> Any:
    return json.loads(raw.decode(encoding), parse_constant=_refuse_constant)


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON.")


def typed(row: Row, name: str, kind: type) -> Any:
    """A field of exactly this type.

    Raises:
        ValueError: it is missing or of another type.
    """
    if name not in row:
        raise ValueError(f"field {name!r} is missing.")
    value = row[name]
    if type(value) is not kind:
        raise ValueError(f"field {name!r} is {value!r:.60}, of type {type(value).__name__}; use {kind.__name__}.")
    return value


def text(row: Row, name: str, default: str | None = None) -> str:
    """A field of text, or its default.

    Raises:
        ValueError: it is missing without default, of another type, or no valid Unicode.
    """
    if name not in row and default is not None:
        return default
    return _unicode(typed(row, name, str), name)


def items(row: Row, name: str, kind: type) -> list[Any]:
    """A field that lists values of exactly this type.

    Raises:
        ValueError: it is missing or of another type.
    """
    values = typed(row, name, list)
    for value in values:
        if type(value) is not kind:
            raise ValueError(f"field {name!r} holds {value!r:.60}; use a list of {kind.__name__}.")
        if kind is str:
            _unicode(value, name)
    return values


def pairs(row: Row, name: str) -> list[list[int]]:
    """A field that lists pairs of integers.

    Raises:
        ValueError: it is missing or of another type.
    """
    found = items(row, name, list)
    for pair in found:
        if len(pair) != 2 or any(type(value) is not int for value in pair):
            raise ValueError(f"field {name!r} holds {pair!r:.60}; use pairs [start, end] of integers.")
    return found


def _unicode(value: str, name: str) -> str:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"field {name!r} holds half a surrogate pair, which no tokenizer can read.")
    return value
