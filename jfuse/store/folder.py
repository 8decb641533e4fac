"""The folder behind `file://` as it is found on disk: names, listings, and opening without following links.

Nothing here imports jax.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from jfuse.store.tier import Absent, Stamp, StoreError

SUFFIX = ".safetensors"
CHUNK_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{8}\.tmp")
QUARANTINED_NAME = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}")


class Kept(NamedTuple):
    """One file of ours, as a listing of the folder finds it."""

    path: str
    id: str  # of a chunk; else its name
    num_bytes: int
    used_ns: int

    def remove(self) -> None:
        """Deletes the file, if it is still there."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class Contents(NamedTuple):
    """Everything of ours in the folder."""

    chunks: list[Kept]
    writes: list[Kept]
    quarantined: list[Kept]

    @property
    def num_bytes(self) -> int:
        """Sizes as announced: a write in progress counts in full."""
        return sum(kept.num_bytes for kind in self for kept in kind)


def check_folder(folder: Path, quarantine: Path) -> None:
    """Makes the folder if it is missing, and tries a write.

    Raises:
        StoreError: it is a file, cannot be made or written to, or its quarantine would lie elsewhere.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder} is a file; give a folder for the store.")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".{'0' * 64}.{secrets.token_hex(4)}.tmp"
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot write to the store folder {folder} ({error.strerror}); give a writable one."
        ) from None
    if os.path.lexists(quarantine) and (quarantine.is_symlink() or not quarantine.is_dir()):
        raise StoreError(f"{quarantine} is a link or a file; remove it, so that the store can put damaged files there.")


@contextmanager
def opened(path: Path | str) -> Iterator[int]:
    """A descriptor for reading; neither follows links nor waits on pipes, nor counts as a use where that can be had."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            file = os.open(path, flags | getattr(os, "O_NOATIME", 0))
        except PermissionError:  # another user's file
            file = os.open(path, flags)
    except FileNotFoundError:
        raise Absent("absent") from None
    except OSError as error:
        what = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise Absent(f"cannot be read ({what})") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise Absent("cannot be read (it is not a file)")
        yield file
    finally:
        os.close(file)


def listed_files(folder: Path, *names: re.Pattern[str]) -> tuple[list[Kept], ...]:
    """The files whose names match, one list for each pattern. Links count as the files that they are."""
    listed: tuple[list[Kept], ...] = tuple([] for _ in names)
    with suppress(FileNotFoundError), os.scandir(folder) as items:
        for item in items:
            for name, kept in zip(names, listed, strict=True):
                if name.fullmatch(item.name):
                    with suppress(FileNotFoundError):  # evicted by another process since it was listed
                        found = item.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(found.st_mode):
                            used_ns = max(found.st_atime_ns, found.st_mtime_ns)
                            kept.append(Kept(item.path, item.name.removesuffix(SUFFIX), found.st_size, used_ns))
    return listed


def listed_ids(folder: Path) -> list[str]:
    """Addresses of the chunk files, by their names alone: a folder of many chunks is listed for every miss."""
    try:
        return [name.removesuffix(SUFFIX) for name in os.listdir(folder) if CHUNK_NAME.fullmatch(name)]
    except FileNotFoundError:
        return []


def oldest_first(kept: Iterable[Kept]) -> list[Kept]:
    """In order of last use."""
    return sorted(kept, key=lambda one: one.used_ns)


def stamp_of(found: os.stat_result) -> Stamp:
    """Inode, and what a change in place would change."""
    return Stamp(found.st_ino, (found.st_size, found.st_mtime_ns))


def sync_folder(folder: Path) -> None:
    """Makes a rename durable."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
