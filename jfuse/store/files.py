"""The `file://` tier: one file per chunk in one folder, for many processes at once.

```
folder/<id>.safetensors            a whole chunk: it was written elsewhere, synced, then renamed
folder/.<id>.<random>.tmp          a write in progress; its writer holds a lock on it, so a dead writer's is known
folder/.lock                       taken while room is made and while a file is renamed, never while bytes move
folder/quarantine/<id>.<random>    damaged files, the first to go when room is needed
```

The folder is the truth: no index file can disagree with it. The last use of a chunk is its file's access time, which
only `touch` sets, so that eviction sees the use of all processes and no file's modification time changes. Nothing here
imports jax.
"""

import errno
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from jfuse.store.folder import (
    CHUNK_NAME,
    QUARANTINED_NAME,
    SUFFIX,
    TEMPORARY_NAME,
    Contents,
    Kept,
    check_folder,
    listed_files,
    listed_ids,
    oldest_first,
    opened,
    stamp_of,
    sync_folder,
)
from jfuse.store.tier import NoRoom, Part, Stamp, Stored, Usage

FULL = (errno.ENOSPC, errno.EDQUOT)


class FileTier:
    """A folder of chunk files."""

    def __init__(self, folder: Path, max_bytes: int | None = None):
        """Makes the folder if it is missing.

        Raises:
            StoreError: it is a file, cannot be made, or cannot be written to.
        """
        self.url = f"file://{folder}"
        self._folder = folder
        self._max_bytes = max_bytes
        self._threads = threading.Lock()
        self._evictions = 0
        self._quarantine = folder / "quarantine"
        check_folder(folder, self._quarantine)
        with self._locked():
            self._remove_dead_writes(self._contents().writes)

    def write(self, id: str, parts: Iterable[Part], num_bytes: int, *, keep: Collection[str] = ()) -> None:
        """Writes to a temporary file, syncs it, renames it. A full disk evicts and is tried once more."""
        keep = {*keep, id}
        try:
            self._write_once(id, parts, num_bytes, keep)
        except OSError as error:
            if error.errno not in FULL or isinstance(error, NoRoom):
                raise
            with self._locked():
                self._free(num_bytes, keep, self._contents())
            self._write_once(id, parts, num_bytes, keep)

    def read(self, id: str) -> Stored:
        """Maps the file into memory."""
        with opened(self._path(id)) as file:
            found = os.fstat(file)
            stamp = stamp_of(found)
            if found.st_size == 0:  # which cannot be mapped
                return Stored(np.empty(0, np.uint8), stamp)
            return Stored(np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), np.uint8), stamp)

    def stamp(self, id: str) -> Stamp | None:
        """Inode, size and modification time."""
        try:
            return stamp_of(os.lstat(self._path(id)))
        except OSError:
            return None

    def head(self, id: str, num_bytes: int) -> tuple[bytes, int]:
        """The first bytes and the size of the whole."""
        with opened(self._path(id)) as file:
            return os.pread(file, num_bytes, 0), os.fstat(file).st_size

    def ids(self) -> list[str]:
        """Every address in the folder, whole or not."""
        return listed_ids(self._folder)

    def touch(self, id: str) -> None:
        """Sets the file's access time; its modification time stays."""
        path = self._path(id)
        # Evicted meanwhile, or another user's file: the order of use is a matter of speed alone.
        with suppress(OSError):
            os.utime(path, ns=(time.time_ns(), os.lstat(path).st_mtime_ns), follow_symlinks=False)

    def quarantine(self, id: str, stamp: Stamp | None) -> None:
        """Moves the file into the quarantine folder."""
        with self._locked():
            if self.stamp(id) == stamp:
                self._quarantine.mkdir(mode=0o700, exist_ok=True)
                os.rename(self._path(id), self._quarantine / f"{id}.{secrets.token_hex(4)}")

    def trim(self) -> None:
        """Evicts what exceeds the cap, of whichever process wrote it."""
        with self._locked(), suppress(NoRoom):  # only writes in progress are left then
            self._make_room(0, frozenset())

    def clear(self) -> None:
        """Removes chunks, quarantined files and dead writes."""
        with self._locked():
            found = self._contents()
            self._remove_dead_writes(found.writes)
            for kept in (*found.chunks, *found.quarantined):
                kept.remove()
            with suppress(OSError):  # missing, or it holds files of the user's
                self._quarantine.rmdir()

    def usage(self) -> Usage:
        """How full the folder is."""
        found = self._contents()
        return Usage(len(found.chunks), found.num_bytes, self._max_bytes, len(found.quarantined), self._evictions)

    def _path(self, id: str) -> str:
        return f"{self._folder}/{id}{SUFFIX}"

    def _write_once(self, id: str, parts: Iterable[Part], num_bytes: int, keep: Collection[str]) -> None:
        temporary = self._folder / f".{id}.{secrets.token_hex(4)}.tmp"
        file = None
        try:
            with self._locked():
                self._make_room(num_bytes, keep)
                file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(file, fcntl.LOCK_EX)
                reserve(file, num_bytes)
            for part in parts:
                write_all(file, part)
            if os.lseek(file, 0, os.SEEK_CUR) != num_bytes:
                raise OSError(errno.EIO, f"not the {num_bytes} bytes that were announced")
            os.fsync(file)
            with self._locked():
                os.replace(temporary, self._path(id))
            sync_folder(self._folder)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            if file is not None:
                os.close(file)

    def _make_room(self, num_bytes: int, keep: Collection[str]) -> None:
        """Brings chunks, writes in progress and quarantine to `num_bytes` below the cap. The lock is held."""
        if self._max_bytes is None:
            return
        found = self._contents()
        if found.writes:
            self._remove_dead_writes(found.writes)
            found = self._contents()
        fixed = (*(chunk for chunk in found.chunks if chunk.id in keep), *found.writes)
        if sum(kept.num_bytes for kept in fixed) + num_bytes > self._max_bytes:
            raise NoRoom(errno.ENOSPC, f"{num_bytes} bytes do not fit under the cap of {self._max_bytes}")
        self._free(found.num_bytes + num_bytes - self._max_bytes, keep, found)

    def _free(self, num_bytes: int, keep: Collection[str], found: Contents) -> None:
        """Deletes quarantined files, then the least recently used chunks, until `num_bytes` are gone."""
        if num_bytes <= 0:
            return
        chunks = {chunk.id for chunk in found.chunks}
        evictable = [chunk for chunk in found.chunks if chunk.id not in keep]
        for kept in (*oldest_first(found.quarantined), *oldest_first(evictable)):
            if num_bytes <= 0:
                return
            kept.remove()
            num_bytes -= kept.num_bytes
            self._evictions += kept.id in chunks

    def _contents(self) -> Contents:
        chunks, writes = listed_files(self._folder, CHUNK_NAME, TEMPORARY_NAME)
        return Contents(chunks, writes, *listed_files(self._quarantine, QUARANTINED_NAME))

    def _remove_dead_writes(self, writes: Iterable[Kept]) -> None:
        """Removes the temporary files of processes that were killed. The lock is held."""
        for kept in writes:
            try:
                file = os.open(kept.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kept.remove()
            except BlockingIOError:
                pass  # its writer lives
            finally:
                os.close(file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other threads and other processes out. A killed process's lock is released by the system."""
        with self._threads:
            # Opened each time: a lock belongs to an open file, which a forked child would share.
            file = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
            finally:
                os.close(file)


def reserve(file: int, num_bytes: int) -> None:
    """Gives a new file its final size, so that every process counts it towards the cap from the start."""
    os.ftruncate(file, num_bytes)


def write_all(file: int, part: Part) -> None:
    """Writes all of `part` at the file's place."""
    view = part.data
    while view:
        view = view[os.write(file, view) :]
