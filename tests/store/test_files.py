"""The `file://` tier: restarts, caps, full disks, links, modes, and what other programs find in the folder."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors

import jfuse
from jfuse import selectors
from jfuse.pipeline import Question
from jfuse.store import ChunkMiss, ChunkStore, StoreError
from jfuse.store import files as files_module
from tests import tiny


def listing(folder):
    return {path.name: path.stat() for path in folder.iterdir()}


def test_a_restart_finds_everything_and_writes_nothing(folder, reopen, make_chunk, same):
    """C-10: hits after reopening; neither reading nor putting again touches a file's content or modification time."""
    chunks = [make_chunk(seed) for seed in range(3)]
    ids = [reopen().put(chunk) for chunk in chunks]
    before = {name: (found.st_mtime_ns, found.st_ino) for name, found in listing(folder).items()}
    store = reopen()
    assert store.ids() == sorted(ids) and len(store) == 3
    for chunk, id in zip(chunks, ids, strict=True):
        assert store.lookup(chunk.tokens).hit
        same(store.read([id])[0], chunk)
        assert store.put(chunk) == id
    assert {name: (found.st_mtime_ns, found.st_ino) for name, found in listing(folder).items()} == before


def test_names_are_hashes_and_modes_are_private(folder, reopen, make_chunk):
    store = reopen()
    ids = [store.put(make_chunk(seed)) for seed in range(2)]
    found = listing(folder)
    assert set(found) == {".lock", *(f"{id}.safetensors" for id in ids)}
    assert {stat.S_IMODE(one.st_mode) for one in found.values()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_safetensors_library_reads_the_file(folder, reopen, fingerprint, make_chunk):
    """Any reader of safetensors finds the arrays and the fingerprint; one layer is one slice."""
    chunk = make_chunk()
    id = reopen().put(chunk)
    with safetensors.safe_open(folder / f"{id}.safetensors", "flax") as file:
        assert file.metadata()["format"] == "jfuse-chunk"
        assert file.metadata()["fingerprint"] == fingerprint.to_json()
        assert set(file.keys()) == {"seal", "tokens", "anchor_score", "anchor_offsets", "anchor_kv", "kv"}
        np.testing.assert_array_equal(file.get_tensor("tokens"), chunk.tokens)
        np.testing.assert_array_equal(file.get_tensor("anchor_score"), chunk.anchor_score)
        kv = np.asarray(file.get_tensor("kv"))
        assert kv.dtype == ml_dtypes.bfloat16 and kv.shape == (3, 2, 23, 2, 4)
        for l, layer in enumerate(chunk.kv):
            assert kv[l].tobytes() == layer.k.tobytes() + layer.v.tobytes()
        assert np.asarray(file.get_slice("kv")[1:2]).tobytes() == kv[1].tobytes()


def test_reading_copies_nothing(reopen, make_chunk):
    """Layers are views of the mapped file, aligned so that a CPU device can take them as they are."""
    store = reopen()
    id = store.put(make_chunk(tokens=64, heads=2, size=16))
    first, again = (store.layer([id], 1)[0].k for _ in range(2))
    assert np.shares_memory(first, again) and not first.flags.owndata
    assert first.ctypes.data % 64 == 0 and store.anchors([id])[0].kv[0].k.ctypes.data % 64 == 0


def test_the_cap_counts_what_was_there(folder, reopen, make_chunk):
    """Chunks of earlier processes, of other models, and quarantined files; reopening under a smaller cap evicts."""
    store = reopen()
    ids = [store.put(make_chunk(seed)) for seed in range(4)]
    size = store.num_bytes // 4
    damaged = folder / f"{ids[3]}.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert not reopen().lookup(make_chunk(3).tokens).hit
    assert (folder / "quarantine").exists() and store.usage()[:2] == (3, 4 * size - 1)
    store.read([ids[0]])
    small = reopen(max_bytes=2 * size)
    assert small.usage()[:4] == (2, 2 * size, 2 * size, 0)
    assert [id in small for id in ids] == [True, False, True, False]


def test_the_order_of_use_survives_a_restart(reopen, make_chunk):
    chunks = [make_chunk(seed) for seed in range(4)]
    store = reopen()
    ids = [store.put(chunk) for chunk in chunks[:3]]
    size = store.num_bytes // 3
    reopen().tokens([ids[0]])  # used by another process
    capped = reopen(max_bytes=3 * size)
    capped.put(chunks[3])
    assert [id in capped for id in ids] == [True, False, True]


def test_clearing_leaves_other_peoples_files(folder, reopen, make_chunk):
    """C-12: the folder is back at its baseline."""
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / f"{'0' * 64}.safetensors").mkdir()
    store = reopen()
    id = store.put(make_chunk())
    (folder / f"{id}.safetensors").write_bytes(b"damaged")
    store.verify()
    store.put(make_chunk(1))
    assert (folder / "quarantine").exists()
    store.clear()
    assert set(listing(folder)) == {".lock", "notes.txt", f"{'0' * 64}.safetensors"} and store.num_bytes == 0


def test_evicted_files_are_not_kept_open(reopen, make_chunk):
    """The bytes of evicted chunks really become free: nothing maps them once their arrays are gone."""
    store = reopen(max_bytes=20_000)
    for seed in range(30):
        store.read([store.put(make_chunk(seed))])
    with open("/proc/self/maps") as maps:
        assert "(deleted)" not in "".join(line for line in maps if ".safetensors" in line)


class FullDisk:
    """A disk of a given number of bytes, for the tier's writes."""

    def __init__(self, monkeypatch, folder, capacity, code=errno.ENOSPC):
        self.folder, self.capacity, self.code, self.refused = folder, capacity, code, 0
        self.write = files_module.write_all
        monkeypatch.setattr(files_module, "write_all", self)

    def __call__(self, file, part):
        used = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir() if path.is_file())
        if used + len(part) > self.capacity:
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))
        self.write(file, part)


def test_a_full_disk_evicts_and_is_tried_once_more(monkeypatch, folder, reopen, make_chunk, same):
    """C-07: the oldest goes, the new one is stored, nobody is bothered."""
    store = reopen()
    chunks = [make_chunk(seed, tokens=500) for seed in range(4)]
    ids = [store.put(chunk) for chunk in chunks[:3]]
    disk = FullDisk(monkeypatch, folder, store.num_bytes + 20_000)
    store.tokens(ids[1:])
    ids.append(store.put(chunks[3]))
    assert disk.refused == 1
    assert [id in store for id in ids] == [False, True, True, True]
    same(store.read([ids[3]])[0], chunks[3])
    assert not [name for name in listing(folder) if name.endswith(".tmp")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_nothing_degrades_to_no_store(monkeypatch, folder, reopen, make_chunk, same, code):
    """C-07: one warning, then every chunk is simply not stored; what is there stays right."""
    store = reopen()
    kept = make_chunk(0)
    with store.hold([store.put(kept)]):
        disk = FullDisk(monkeypatch, folder, 0, code)
        with pytest.warns(RuntimeWarning, match="did not take a chunk") as caught:
            id = store.put(make_chunk(1))
        assert len(caught) == 1 and os.strerror(code) in str(caught[0].message)
        assert disk.refused == (2 if code in (errno.ENOSPC, errno.EDQUOT) else 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.put(make_chunk(2))
        assert store.lookup(make_chunk(1).tokens).reason == f"not stored: {os.strerror(code)}"
        same(store.read(store.ids())[0], kept)
    with pytest.raises(ChunkMiss, match="not stored"):
        store.read([id])
    assert not [name for name in listing(folder) if name.endswith(".tmp")]
    monkeypatch.setattr(files_module, "write_all", disk.write)
    assert store.put(make_chunk(1)) == id and store.lookup(make_chunk(1).tokens).hit


def test_requests_are_answered_all_the_same_while_the_disk_is_full(monkeypatch, folder, reopen):
    """C-07: equal answers with and without room, one warning, and every report says what was not kept."""
    model, rng = tiny.build_model(), np.random.default_rng(0)
    passages = [rng.integers(0, 128, length).astype(np.int32) for length in (21, 34)]

    def ask(store):
        config = jfuse.FusionConfig(0.3, pad_to=64, row_block=32)
        question = Question(np.arange(7, 12))
        return jfuse.answer(model, store, passages, question, selectors.qcfuse((1, 2)), config, max_new_tokens=4)

    expected = ask(ChunkStore.open("memory://", model))
    store = reopen(model)
    FullDisk(monkeypatch, folder, 0)
    with pytest.warns(RuntimeWarning, match="did not take a chunk") as caught:
        answers = [ask(store), ask(store)]
    assert len(caught) == 1 and not store.ids()
    for found in answers:
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.selection.recompute, expected.selection.recompute)
        assert found.report.hits == 0
    assert set(answers[1].report.missed.values()) == {f"not stored: {os.strerror(errno.ENOSPC)}"}


def test_room_that_cannot_be_reserved_leaves_nothing_behind(monkeypatch, folder, reopen, make_chunk):
    """No temporary file, no lock and no open file."""

    def refuses(file, num_bytes):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    store = reopen()
    monkeypatch.setattr(files_module, "reserve", refuses)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(RuntimeWarning, match="did not take a chunk"):
        store.put(make_chunk(0))
    assert not [name for name in listing(folder) if name.endswith(".tmp")]
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_are_neither_followed_nor_served(folder, reopen, make_chunk, tmp_path, same):
    """A chunk's name that leads out of the folder is a miss; putting the chunk replaces the link, not its target."""
    chunk, store = make_chunk(), reopen()
    id = store.put(chunk)
    path, outside = folder / f"{id}.safetensors", tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    content = outside.read_bytes()
    store = reopen()
    assert store.lookup(chunk.tokens).reason == "cannot be read (it is a link)" and store.ids() == []
    assert store.put(chunk) == id and not path.is_symlink()
    same(store.read([id])[0], chunk)
    assert outside.read_bytes() == content


def test_a_quarantine_that_leads_elsewhere_is_refused(folder, reopen, tmp_path):
    folder.mkdir()
    (folder / "quarantine").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="quarantine is a link"):
        reopen()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_pipe_under_a_chunks_name(folder, reopen, make_chunk, make):
    chunk, store = make_chunk(), reopen()
    id = store.put(chunk)
    path = folder / f"{id}.safetensors"
    path.unlink()
    make(path)
    store = reopen()
    assert store.lookup(chunk.tokens).reason == "cannot be read (it is not a file)" and store.ids() == []


def test_a_path_that_is_a_file(tmp_path, fingerprint):
    file = tmp_path / "file"
    file.write_text("text")
    for path in (file, file / "below"):
        with pytest.raises(StoreError, match="is a file; give a folder|cannot write to the store folder") as error:
            ChunkStore.open(path, fingerprint)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert file.read_text() == "text"


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_that_cannot_be_used_is_one_clear_line(mode, without_jax):
    """As another user where the tests run as root, whom no mode stops."""
    root = Path(tempfile.mkdtemp())
    folder = root / "above" / "store"
    folder.mkdir(parents=True)
    root.chmod(0o755)
    (folder if mode else folder.parent).chmod(mode)
    program = f"""
if os.geteuid() == 0:
    os.setuid(65534)
try:
    tier_at({str(folder)!r})
except StoreError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", without_jax + program], capture_output=True, text=True)
    assert run.stdout.splitlines() == [
        f"cannot write to the store folder {folder} (Permission denied); give a writable one."
    ], run.stderr
    folder.parent.chmod(0o755)
    shutil.rmtree(root)


def test_paths_are_taken_as_they_are_written(tmp_path, fingerprint, make_chunk, monkeypatch):
    monkeypatch.chdir(tmp_path)
    id = ChunkStore.open("file://cache", fingerprint).put(make_chunk())
    absolute = tmp_path / "cache"
    for url in (f"file://{absolute}", str(absolute), absolute, "cache", f"../{tmp_path.name}/cache"):
        assert ChunkStore.open(url, fingerprint).ids() == [id]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ChunkStore.open("file://~/cache", fingerprint).ids() == [id]
    odd = ChunkStore.open(tmp_path / "a b%20c" / "d", fingerprint)
    odd.put(make_chunk())
    assert len(ChunkStore.open(odd.url, fingerprint)) == 1
