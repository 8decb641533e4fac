"""A run's folder: rows that are only ever appended, so that a run which was killed goes on where it stopped.

In go rows with a key and what identifies the run; out come the rows of all goes. A torn last line is dropped. A folder
that holds another run's rows is refused.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from jfuse.fingerprint import canonical_json

ROWS, TIMINGS, MANIFEST = "predictions.jsonl", "timings.jsonl", "manifest.json"
KEY = ("model", "task", "id", "method", "ratio")

Row = dict[str, Any]


class Records:
    """The rows of one run; use it in a `with` block, which holds the folder against a second process.

    Args:
        identity: what the rows depend on, by name. What the folder holds must agree in all that both name; more
            tasks, models or samples may join.
        about: further fields of the manifest.

    Raises:
        ValueError: the folder holds rows of another run, or a damaged line that is not the last.
        BlockingIOError: another process is writing to the folder.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any], *, about: Mapping[str, Any] | None = None):
        self.folder, self.identity = Path(folder), json.loads(canonical_json(identity))
        self._about = dict(about or {})
        self._files: dict[str, IO[str]] = {}
        self.rows: dict[tuple[Any, ...], Row] = {}

    def __enter__(self) -> "Records":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise BlockingIOError(
                f"Another process is writing to {self.folder}; wait for it, or give another folder."
            ) from error
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        self._lock.close()

    def _open(self) -> None:
        self.identity = _merged(known_identity(self.folder, self.identity), self.identity)
        write_json(self.folder / MANIFEST, {**self._about, "identity": self.identity})
        self.rows = {key_of(row): row for row in read_rows(self.folder / ROWS, mend=True)}
        read_rows(self.folder / TIMINGS, mend=True)
        self._files = {name: (self.folder / name).open("a", encoding="utf-8") for name in (ROWS, TIMINGS)}

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self.rows

    def add(self, row: Row, seconds: Mapping[str, float]) -> None:
        """Appends a row, safe on disk when this returns; times stand in a file of their own.

        Raises:
            ValueError: a row whose key is there already, or that holds NaN.
        """
        if key_of(row) in self.rows:
            raise ValueError(f"The row {key_of(row)} is there already; rows are only added.")
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        self._append(TIMINGS, json.dumps({name: row[name] for name in KEY} | dict(seconds), ensure_ascii=False))
        self._append(ROWS, line)  # last, so that a row without times is never there
        self.rows[key_of(row)] = row

    def _append(self, name: str, line: str) -> None:
        file = self._files[name]
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def known_identity(folder: str | Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a folder says of its rows, if a run of this identity may join them; {} of a folder without rows.

    Raises:
        ValueError: the folder holds rows of another run, or of nobody knows which.
    """
    folder, now = Path(folder), json.loads(canonical_json(identity))
    manifest = folder / MANIFEST
    known = json.loads(manifest.read_text(encoding="utf-8"))["identity"] if manifest.exists() else {}
    if not known and (folder / ROWS).exists():
        raise ValueError(f"{folder} holds {ROWS} but no {MANIFEST}, so whose rows they are cannot be told.")
    if conflicts := _conflicts(known, now):
        name, before, after = conflicts[0]
        raise ValueError(
            f"{folder} holds rows of another run: {name} was {before!r} and is {after!r} now. "
            "Give a new folder, or the same settings."
        )
    return known


def key_of(row: Row) -> tuple[Any, ...]:
    """What a row is found by."""
    return tuple(row[name] for name in KEY)


def read_rows(path: str | Path, *, mend: bool = False) -> list[Row]:
    """The rows of a file of JSON lines; none if it does not exist. A torn last line does not count.

    Args:
        mend: also cut the torn line off the file.

    Raises:
        ValueError: a damaged line before the last one.
    """
    path = Path(path)
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if mend and whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    rows = []
    for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged ({error}); give a new folder, or repair it.") from error
    return rows


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(path)


def _conflicts(old: Any, new: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    """Where two identities disagree. Of mappings only what both have is compared."""
    if isinstance(old, dict) and isinstance(new, dict):
        shared = [name for name in new if name in old]
        return [one for name in shared for one in _conflicts(old[name], new[name], f"{at}.{name}".lstrip("."))]
    return [] if old == new else [(at, old, new)]


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        joined = {**old, **new}
        return {name: _merged(old.get(name, value), value) for name, value in joined.items()}
    return new
