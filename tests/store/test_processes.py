"""Many processes over one folder: writing the same, reading while it is written, killed at any moment."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jfuse.store import ChunkMiss, ChunkStore
from jfuse.store.layout import encode
from jfuse.store.urls import tier_at


@pytest.fixture
def start(without_jax):
    def start(program, *arguments, seed="0"):
        return subprocess.Popen(
            [sys.executable, "-c", without_jax + program, *map(str, arguments)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def output(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


WRITE = """
tier = tier_at(sys.argv[1], int(sys.argv[3]) or None)
for seed in range(int(sys.argv[2])):
    one = encoded(seed)
    tier.write(one.id, one.parts, one.num_bytes)
    print(one.id)
"""


def test_four_processes_open_a_fresh_store_and_write_the_same(folder, fingerprint, start):
    """C-05: no exception, one valid entry for each chunk."""
    processes = [start(WRITE, folder, 5, 0) for _ in range(4)]
    ids = [output(process).split() for process in processes]
    store = ChunkStore.open(folder, fingerprint)
    assert all(one == ids[0] for one in ids) and store.ids() == sorted(ids[0])
    assert store.verify() == (5, {}) and store.usage().num_chunks == 5
    assert {path.name for path in folder.iterdir()} == {".lock", *(f"{id}.safetensors" for id in ids[0])}


def _size(path):
    """0 for a file that was renamed or evicted meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_four_processes_never_exceed_the_cap(folder, fingerprint, start):
    """Room for a write is taken before its bytes move, whichever process asks."""
    cap = 900_000
    processes = [start(WRITE.replace("range(", f"range({turn}00, {turn}00 + "), folder, 15, cap) for turn in range(4)]
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, sum(map(_size, folder.glob("*"))) if folder.exists() else 0)
        time.sleep(0.002)
    for process in processes:
        output(process)
    store = ChunkStore.open(folder, fingerprint)
    assert most <= cap * 1.01 and store.num_bytes <= cap  # a listing that races with renames counts a file twice
    assert store.usage().num_chunks >= 5 and store.verify().damaged == {}


READ = """
tier = tier_at(sys.argv[1])
one = encoded(0)
entry = Entry(one.id, *tier.read(one.id))
entry.verify()
for l in range(entry.num_layers):
    sys.stdout.write("".join(half.tobytes().hex() for half in entry.layer(l)))
"""


def test_another_process_with_another_hash_seed_finds_the_same(folder, fingerprint, start):
    """C-08, C-09, C-10: written in one process, found in others, bit for bit."""
    (id,) = output(start(WRITE, folder, 1, 0, seed="1")).split()
    read = [output(start(READ, folder, seed=seed)) for seed in ("2", "3")]
    (chunk,) = ChunkStore.open(folder, fingerprint).read([id])
    assert set(read) == {"".join(half.tobytes().hex() for layer in chunk.kv for half in layer)}


FORK = """
import random, signal, time
folder, kills = sys.argv[1], int(sys.argv[2])
ready = [encoded(seed) for seed in range(40)]
random.seed(0)
tier, one = tier_at(folder), encoded(99)
began = time.perf_counter()
tier.write(one.id, one.parts, one.num_bytes)
usual = time.perf_counter() - began
out, into = os.pipe()
written = set()
for kill in range(kills):
    child = os.fork()
    if not child:
        os.write(into, b"s" * 64)  # writing starts now
        write(kill)
        os._exit(0)
    assert os.read(out, 64) == b"s" * 64
    time.sleep(random.random() * 1.5 * usual)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.write(into, b"e" * 64)
    while (id := os.read(out, 64)) != b"e" * 64:
        written.add(id.decode())
    tier = tier_at(folder)  # removes what the dead writer left
    for id in tier.ids():
        Entry(id, *tier.read(id)).verify()
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    assert not left, left
print(*written)
"""

OVERWRITE = """
def write(kill):
    tier = tier_at(folder)
    for turn in range(1_000):
        one = ready[(kill + turn) % 8]
        if turn % 3 == 2 and tier.stamp(one.id):
            os.unlink(os.path.join(folder, one.id + ".safetensors"))
        tier.write(one.id, one.parts, one.num_bytes)
        os.write(into, one.id.encode())
"""

APPEND = """
def write(kill):
    tier = tier_at(folder)
    for one in ready[kill:]:
        tier.write(one.id, one.parts, one.num_bytes)
        os.write(into, one.id.encode())
"""


def test_two_hundred_random_kills_leave_whole_files_only(folder, fingerprint, start):
    """C-04, C-06: whatever a writer was doing, each visible file is whole, and nothing else stays behind."""
    written = output(start(OVERWRITE + FORK, folder, 200)).split()
    store = ChunkStore.open(folder, fingerprint)
    assert written and store.verify().damaged == {} and store.usage().num_quarantined == 0
    assert len(store) > 0


def test_no_complete_entry_is_lost_to_a_kill(folder, fingerprint, start):
    """What `write` returned for is there after any later kill."""
    ids = set(output(start(APPEND + FORK, folder, 40)).split())
    store = ChunkStore.open(folder, fingerprint)
    assert ids and ids <= set(store.ids())
    assert store.verify().damaged == {}


def test_a_dead_writers_bytes_do_not_count(folder, fingerprint, start):
    """A killed process's temporary file is removed before anything is evicted for its sake; a living one's is not."""
    program = """
tier, one = tier_at(sys.argv[1]), encoded(0)
class Parts:
    def __iter__(self):
        yield one.parts[0]
        print("half", flush=True)
        sys.stdin.read()
tier.write(one.id, Parts(), one.num_bytes)
"""
    process = start(program, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    store = ChunkStore.open(folder, fingerprint)
    (temporary,) = folder.glob(".*.tmp")
    size = temporary.stat().st_size
    assert store.ids() == [] and store.num_bytes == size > 100_000
    process.kill()
    process.communicate()
    capped = ChunkStore.open(folder, fingerprint, max_bytes=size)
    assert capped.num_bytes == 0 and not temporary.exists()


@pytest.mark.parametrize("seed", range(3))
def test_readers_beside_writers_and_evictions(folder, fingerprint, make_chunk, same, seed):
    """C-04: a reader loop beside a slow writer and a capped one reads whole chunks or misses."""
    chunks = [make_chunk(i, tokens=100) for i in range(6)]
    encodings = [encode(fingerprint, chunk.tokens, chunk.kv, chunk.anchor_score) for chunk in chunks]
    rng = np.random.default_rng(seed)
    failures = []

    def slow(parts):
        for part in parts:
            time.sleep(rng.random() * 0.002)
            yield part

    def write(cap):
        tier = tier_at(str(folder), cap)
        try:
            for turn in range(12):
                one = encodings[turn % len(encodings)]
                tier.write(one.id, slow(one.parts), one.num_bytes)
        except OSError as error:
            if "do not fit under the cap" not in str(error):  # the other writer holds the room just now
                failures.append(error)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(cap,)) for cap in (None, 4 * encodings[0].num_bytes)]
    for writer in writers:
        writer.start()
    store, hits = ChunkStore.open(folder, fingerprint), 0
    while any(writer.is_alive() for writer in writers):
        for chunk, one in zip(chunks, encodings, strict=True):
            try:
                same(store.read([one.id])[0], chunk)
                hits += 1
            except ChunkMiss as miss:
                assert miss.reason == "absent"
    assert not failures and hits > 0
    assert ChunkStore.open(folder, fingerprint).verify().damaged == {}
