"""No damaged, foreign or half-written file is ever served: it is a miss with its reason, and lies in quarantine."""

import json
import os
import pickle
import struct

import numpy as np
import pytest
import xxhash

from jfuse.fingerprint import FORMAT_VERSION
from jfuse.store import ChunkMiss, ChunkStore, StoreError
from jfuse.store.layout import as_bytes, encode
from jfuse.store.tier import Absent
from jfuse.store.urls import tier_at


@pytest.fixture
def chunk(make_chunk):
    return make_chunk(tokens=9, layers=2)


@pytest.fixture
def path(folder, reopen, chunk):
    """The file of one stored chunk."""
    id = reopen().put(chunk)
    return folder / f"{id}.safetensors"


def rewrite(path, content):
    """Replaces bytes in place, and makes sure that the clock's grain cannot hide it."""
    path.write_bytes(content)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000))


def outcomes(store, id):
    """Everything that a reader could get of a chunk, as reasons of misses."""
    reasons = []
    for call in (
        lambda: store.read([id]),
        lambda: store.tokens([id]),
        lambda: store.anchors([id]),
        lambda: store.layer([id], 0),
        lambda: store.inspect(id),
    ):
        try:
            call()
            reasons.append(None)
        except ChunkMiss as miss:
            reasons.append(miss.reason)
    return reasons


def assert_quarantined(store, folder, path, chunk, same):
    """A miss with the reason, the file set aside, and room for a fresh copy."""
    id = path.name.removesuffix(".safetensors")
    found = store.lookup(chunk.tokens)
    assert not found.hit and found.reason.startswith("damaged: ")
    assert id not in store and outcomes(store, id) == [found.reason] * 5
    assert not path.exists() and [file.name[:64] for file in (folder / "quarantine").iterdir()] == [id]
    assert store.usage().num_quarantined == 1
    same(store.read([store.put(chunk)])[0], chunk)
    assert store.lookup(chunk.tokens).hit and store.verify().damaged == {}


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 0.5, 0.9, -1])
@pytest.mark.parametrize("when", ["before open", "after open", "after use"])
def test_truncated(folder, path, reopen, chunk, same, keep, when):
    """C-03: emptied, cut inside the header, by half, by 10 %, by one byte."""
    store = reopen()
    if when == "after use":
        store.read(store.ids())
    whole = path.read_bytes()
    rewrite(path, whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    assert_quarantined(reopen() if when == "before open" else store, folder, path, chunk, same)


def test_grown(folder, path, reopen, chunk, same):
    rewrite(path, path.read_bytes() + b"\0")
    assert_quarantined(reopen(), folder, path, chunk, same)


def test_a_flipped_bit_anywhere_is_never_served(path, reopen, chunk, same):
    """Every byte of header, seal, padding, tokens, scores, anchors and layers: each read is right or a miss."""
    whole = path.read_bytes()
    id = path.name.removesuffix(".safetensors")
    rng = np.random.default_rng(0)
    seal = 8 + struct.unpack("<Q", whole[:8])[0]
    for place in [*range(0, len(whole), 13), *range(seal, seal + 64, 3), *rng.integers(0, len(whole), 50)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        store = reopen()
        assert list(store.verify().damaged) == [id], f"byte {place} of {len(whole)}"
        assert not store.lookup(chunk.tokens).hit and not path.exists()
    path.write_bytes(whole)
    same(reopen().read([id])[0], chunk)


def test_damage_is_found_by_whatever_reads_it_first(folder, path, reopen, chunk, same):
    """Each range is verified when it is read, and a read of the rest still works until then."""
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1  # the last byte: values of the last layer
    rewrite(path, whole)
    store = reopen()
    id = store.ids()[0]
    assert store.lookup(chunk.tokens).hit
    store.anchors([id])
    store.layer([id], 0)
    store.layer([id], 1, values=False)
    with pytest.raises(ChunkMiss, match="values of layer 1 do not match"):
        store.layer([id], 1)
    assert_quarantined(store, folder, path, chunk, same)


def test_damage_after_use_is_found_again(folder, path, reopen, chunk, same):
    """What was verified once is verified anew when the file has changed."""
    store = reopen()
    store.read(store.ids())
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    rewrite(path, whole)
    with pytest.raises(ChunkMiss, match="damaged"):
        store.read(store.ids())
    assert_quarantined(store, folder, path, chunk, same)


def test_verify_reads_what_was_checked_on_opening_again(path, reopen, chunk):
    """A byte of the tokens turns in an open chunk, with size and times as they were."""
    store = reopen()
    (id,) = store.ids()
    store.read([id])
    whole, times = bytearray(path.read_bytes()), path.stat()
    seal = 8 + struct.unpack("<Q", whole[:8])[0]
    start = bytes(whole).index(np.asarray(chunk.tokens, "<i4").tobytes(), seal)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes([whole[start] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert list(store.verify().damaged) == [id]
    with pytest.raises(ChunkMiss):
        store.tokens([id])


def test_held_chunks_that_change_in_place_are_not_served(path, reopen, chunk):
    store = reopen()
    ids = store.ids()
    with store.hold(ids):
        whole = bytearray(path.read_bytes())
        whole[200] ^= 1
        rewrite(path, whole)
        with pytest.raises(ChunkMiss, match="damaged"):
            store.read(ids)


def test_another_chunks_file_under_this_name(folder, path, reopen, make_chunk, chunk, same):
    """A whole, valid file is still refused where its content does not belong."""
    store = reopen()
    other = store.put(make_chunk(5))
    path.write_bytes((folder / f"{other}.safetensors").read_bytes())
    store = reopen()
    assert store.lookup(chunk.tokens).reason == f"damaged: it holds the chunk {other}"
    assert other in store
    assert_quarantined(store, folder, path, chunk, same)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_is_never_opened(folder, path, reopen, chunk, tmp_path, same):
    """C-11: ignored under its own name, quarantined under a chunk's; never executed."""
    marker = tmp_path / "executed"
    payload = pickle.dumps(Payload(marker))
    (folder / "model.pkl").write_bytes(payload)
    path.write_bytes(payload)
    store = reopen()
    store.verify()
    assert_quarantined(store, folder, path, chunk, same)
    store.clear()
    assert not marker.exists() and (folder / "model.pkl").exists()


def test_foreign_files(folder, path, reopen, chunk, same):
    """A safetensors file of somebody else, text, zeros: not ours, not served."""
    import safetensors.numpy

    foreign = [
        safetensors.numpy.save({"weight": np.zeros((100, 4), np.float32)}),
        b"hello" * 100,
        bytes(4096),
        struct.pack("<Q", 2**63) + bytes(4096),
        struct.pack("<Q", 100) + b"[" * 100 + bytes(200),
    ]
    for content in foreign:
        path.write_bytes(content)
        store = reopen()
        assert not store.lookup(chunk.tokens).hit and store.usage().num_quarantined == 1
        store.clear()
    path.write_bytes(foreign[0])
    assert_quarantined(reopen(), folder, path, chunk, same)


def forged(fingerprint, chunk, change):
    """A file whose header was changed and sealed again, as no accident would."""
    encoded = encode(fingerprint, chunk.tokens, chunk.kv, chunk.anchor_score)
    header, seal, *rest = (part.tobytes() for part in encoded.parts)
    fields = json.loads(header[8:])
    change(fields)
    text = json.dumps(fields).encode()
    head = struct.pack("<Q", len(text)) + text
    return head + xxhash.xxh3_64_digest(head) + seal[8:] + b"".join(rest)


def test_forged_headers_are_refused_before_anything_is_read(folder, path, fingerprint, reopen, chunk):
    """Sizes, offsets, overlaps, counts and types that the format does not allow."""

    def shape(name, value):
        return lambda fields: fields[name].update(shape=value)

    def metadata(name, value):
        return lambda fields: fields["__metadata__"].update({name: value})

    changes = [
        shape("kv", [2**60, 2, 9, 2, 4]),
        shape("kv", [2, 2, -9, 2, 4]),
        shape("kv", [2, 2, 9.0, 2, 4]),
        shape("kv", [2, 2, 9, 2]),
        shape("kv", "2"),
        shape("tokens", [10]),
        lambda fields: fields["kv"].update(data_offsets=fields["anchor_kv"]["data_offsets"]),
        lambda fields: fields["kv"].update(dtype="F64"),
        lambda fields: fields["kv"].update(dtype="F16"),
        lambda fields: fields["kv"].pop("shape"),
        lambda fields: fields.pop("tokens"),
        lambda fields: fields.pop("__metadata__"),
        lambda fields: fields.update(extra=fields["tokens"]),
        lambda fields: fields.update(kv=3),
        metadata("format", "other"),
        metadata("format_version", "one"),
        metadata("fingerprint", "{}"),
        metadata("fingerprint", fingerprint.to_json().replace("w1", "w2")),
        metadata("tokens_sha256", "0" * 64),
        metadata("checksums", '{"small":"","layers":[],"anchors":[]}'),
        metadata("checksums", "[]"),
        metadata("anchor_ratio", "much"),
    ]
    for change in changes:
        path.write_bytes(forged(fingerprint, chunk, change))
        store = reopen()
        assert store.lookup(chunk.tokens).reason.startswith("damaged: ") and not path.exists()
    path.write_bytes(forged(fingerprint, chunk, lambda fields: None))
    assert reopen().lookup(chunk.tokens).hit


def test_a_newer_format_is_one_clear_line(folder, path, fingerprint, reopen, chunk):
    """And nothing is evicted from a newer jfuse's folder."""
    newer = str(FORMAT_VERSION + 1)
    content = forged(fingerprint, chunk, lambda fields: fields["__metadata__"].update(format_version=newer))
    path.write_bytes(content)
    with pytest.raises(StoreError, match=f"format version {newer}, and this jfuse reads version 1; update") as error:
        reopen(max_bytes=1)
    assert "\n" not in str(error.value) and path.read_bytes() == content


class Parts:
    """A chunk's bytes that fail, or wait, half-way."""

    def __init__(self, encoded, at_half):
        self.parts = encoded.parts
        self.at_half = at_half

    def __iter__(self):
        for i, part in enumerate(self.parts):
            if i == len(self.parts) // 2:
                self.at_half()
            yield part


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt(), MemoryError()])
def test_a_write_that_fails_half_way_stays_invisible(url, fingerprint, chunk, error):
    """C-06."""

    def fail():
        raise error

    tier = tier_at(url)
    encoded = encode(fingerprint, chunk.tokens, chunk.kv, chunk.anchor_score)
    with pytest.raises(type(error)):
        tier.write(encoded.id, Parts(encoded, fail), encoded.num_bytes)
    store = ChunkStore(tier, fingerprint)
    assert store.lookup(chunk.tokens).reason == "absent" and store.num_bytes == 0
    with pytest.raises(OSError, match="announced|instead of"):
        tier.write(encoded.id, encoded.parts[:-1], encoded.num_bytes)
    assert store.lookup(chunk.tokens).reason == "absent" and store.num_bytes == 0


def test_a_write_in_progress_is_invisible(url, fingerprint, chunk, same):
    """C-04: a reader during the write sees the old state, never a part."""
    tier = tier_at(url)
    reader = ChunkStore(tier_at(url), fingerprint) if url.startswith("file") else ChunkStore(tier, fingerprint)
    encoded = encode(fingerprint, chunk.tokens, chunk.kv, chunk.anchor_score)
    seen = []

    def look():
        seen.append(reader.lookup(chunk.tokens).reason)
        with pytest.raises(Absent):
            tier.read(encoded.id)

    tier.write(encoded.id, Parts(encoded, look), encoded.num_bytes)
    assert seen == ["absent"]
    same(reader.read([encoded.id])[0], chunk)


def test_the_checksummed_layout_has_no_holes(fingerprint, chunk):
    """Every byte of the file belongs to the header, the seal, or a tensor with a checksum."""
    encoded = encode(fingerprint, chunk.tokens, chunk.kv, chunk.anchor_score)
    table = encoded.header.shape.table()
    spans = sorted(place["data_offsets"] for place in table.values())
    assert spans[0][0] == 0 and spans[-1][1] == encoded.header.shape.data_bytes
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert sum(len(as_bytes(part)) for part in encoded.parts) == encoded.num_bytes
    assert encoded.header.data_start % 64 == 0 and table["anchor_kv"]["data_offsets"][0] % 64 == 0
