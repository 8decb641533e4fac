"""Host memory: what lies there, in which kind of memory, and how it moves."""

import functools
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jfuse import offload
from jfuse.host_tier import HostTier
from jfuse.offload import PINNED, frozen_copy, host_memory, prefetch, staged, to_device, to_host
from jfuse.pipeline import begin
from jfuse.store import ChunkMiss
from tests.serving.conftest import SELECTORS, same_bits


@pytest.fixture(autouse=True)
def no_notice_yet(monkeypatch):
    monkeypatch.setattr(offload, "_noticed", set())


def test_chunks_lie_in_pinned_memory_where_the_device_has_it(kit):
    """The CPU backend has the kind as well, so that the path of a GPU is tested here."""
    host = HostTier(kit.disk, pinned=True)
    assert host.kind == PINNED and host.load(kit.ids) == len(kit.ids)
    for half in jax.tree.leaves([host.get(id).kv for id in kit.ids]):
        assert half.sharding.memory_kind == PINNED
    held = [(found.kv, found.tokens, found.anchors) for found in map(host.get, kit.ids)]
    assert host.num_bytes == sum(a.nbytes for a in jax.tree.leaves(held))
    ordinary = HostTier(kit.disk)
    assert ordinary.kind == "ordinary", "a CPU's own memory is host memory"
    ordinary.load(kit.ids)
    for half in jax.tree.leaves(ordinary.get(kit.ids[0]).kv):
        assert isinstance(half, np.ndarray) and not half.flags.writeable
        assert half.ctypes.data % 64 == 0, "a CPU device can use it in place"


def without_pinned(platform="rocket"):
    return SimpleNamespace(platform=platform, addressable_memories=lambda: [SimpleNamespace(kind="device")])


def test_a_device_without_pinned_memory_gets_ordinary_memory_and_one_notice():
    """P-03."""
    with pytest.warns(RuntimeWarning, match="rocket devices have no pinned_host memory") as notices:
        assert host_memory(without_pinned()) == "ordinary"
        assert host_memory(without_pinned()) == "ordinary"
    assert len(notices) == 1
    assert host_memory(without_pinned(), pinned=False) == "ordinary"


def placed(kit, source):
    with begin(kit.model, source, SELECTORS["reuse"], kit.config(), prefix=kit.prefix) as incoming:
        return jax.tree.leaves([incoming.pop(l) for l in range(4)])


def test_pinned_memory_that_is_full_gives_way_with_one_notice_and_the_same_results(kit, monkeypatch):
    """P-03: a pinned pool that is smaller than the data."""
    put, room = jax.device_put, [1]

    def scarce(tree, to=None, **options):
        if getattr(to, "memory_kind", None) == PINNED:
            if not room[0]:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")
            room[0] -= 1
        return put(tree, to, **options)

    monkeypatch.setattr(jax, "device_put", scarce)
    with pytest.warns(RuntimeWarning, match="pinned_host memory is full") as notices:
        source = kit.hosted(pinned=True)
    assert len(notices) == 1
    kinds = {isinstance(source.layer(i, 0).k, np.ndarray) for i in range(len(kit.ids))}
    assert kinds == {True, False} and not source.waits
    for a, b in zip(placed(kit, source), placed(kit, kit.stored()), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_bounded_tier_keeps_the_latest_and_the_rest_is_read_from_the_store(kit):
    """Needs 14 and 22: a cap, least recently used first, and requests that do not notice."""
    one = HostTier(kit.disk)
    one.load(kit.ids[:1])
    host = HostTier(kit.disk, max_bytes=5 * one.num_bytes // 2)
    assert host.load(kit.ids) == 2 and len(host) == 2 and host.num_bytes <= host.max_bytes
    assert host.get(kit.ids[0]) is None and host.get(kit.ids[-1]) is not None
    host.get(kit.ids[2])  # now the other one is the older
    host.load(kit.ids[:1])
    assert host.get(kit.ids[2]) is not None and host.get(kit.ids[3]) is None
    source = kit.stored(host=host)
    assert [source.tier(i) for i in range(4)] == ["host", "disk", "host", "disk"] and source.waits
    same_bits(kit.serve(source), kit.serve(kit.stored()))
    tiny = HostTier(kit.disk, max_bytes=10)
    assert tiny.load(kit.ids) == 0 and tiny.num_bytes == 0
    host.clear()
    assert len(host) == host.num_bytes == 0
    with pytest.raises(ValueError, match="max_bytes is 0"):
        HostTier(kit.disk, max_bytes=0)


def test_hosted_chunks_outlive_the_store_and_absent_ones_are_a_miss(kit):
    source = kit.hosted()
    expected = kit.serve(kit.stored())
    kit.disk.clear()
    same_bits(kit.serve(source), expected)
    with pytest.raises(ChunkMiss):
        HostTier(kit.disk).load(kit.ids)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_transfers_start_ahead_of_their_use_and_wait_for_nothing(kit, ahead):
    """The order of puts and computations: with two ahead p0 p1 p2 c0 p3 c1 c2 c3."""
    log = []

    def put(pieces):
        log.append(f"p{sum(entry[0] == 'p' for entry in log)}")
        return to_device(pieces, jax.devices()[0])

    source = kit.hosted()
    with begin(kit.model, source, SELECTORS["reuse"], kit.config(ahead), prefix=kit.prefix, put=put) as incoming:
        for l in range(4):
            incoming.pop(l)
            log.append(f"c{l}")
    expected = {
        0: "p0 c0 p1 c1 p2 c2 p3 c3",
        1: "p0 p1 c0 p2 c1 p3 c2 c3",
        2: "p0 p1 p2 c0 p3 c1 c2 c3",
    }
    assert " ".join(log) == expected[ahead]


def test_prefetch_keeps_layers_in_flight():
    log = []

    def put(layer):
        log.append(f"p{layer}")
        return layer

    for layer in prefetch(range(4), ahead=2, put=put):
        log.append(f"c{layer}")
    assert " ".join(log) == "p0 p1 p2 c0 p3 c1 c2 c3"


def test_the_program_for_cuda_moves_operands_from_pinned_host_memory_to_the_device():
    """Lowered here, without a GPU: the operand is placed on the host, the result on the device."""
    device = jax.devices()[0]
    pinned = SingleDeviceSharding(device, memory_kind=PINNED)
    operand = jax.ShapeDtypeStruct((8, 2, 4), jnp.bfloat16, sharding=pinned)

    def scale(operand):
        return to_device(operand, device) * 2

    text = jax.jit(scale).trace(operand).lower(lowering_platforms=("cuda",)).as_text()
    main = next(line for line in text.splitlines() if "@main" in line)
    assert 'memory_kind = "pinned_host"' in main.split("->")[0]
    assert "annotate_device_placement" in text and '_xla_buffer_placement = "device"' in text
    moved = jax.jit(functools.partial(to_device, device=device))(jax.device_put(np.ones((3, 2, 4)), pinned))
    assert moved.sharding.memory_kind == device.default_memory().kind


def test_what_lies_on_the_device_is_not_moved():
    device = jax.devices()[0]
    here = jnp.ones((4, 2, 3))
    assert to_device([here], device)[0] is here
    back = to_device(jax.device_put(here, SingleDeviceSharding(device, memory_kind=PINNED)), device)
    assert back.sharding.memory_kind == device.default_memory().kind
    np.testing.assert_array_equal(back, here)
    assert to_host(here, device, "ordinary") is here


def test_arrays_that_could_be_refilled_are_copied_and_promises_are_kept():
    """P-01: what is read-only or immutable passes, what is writable or short is copied, aligned and frozen."""
    writable = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
    frozen = writable.copy()
    frozen.flags.writeable = False
    on_device = jnp.asarray(writable)
    assert staged(frozen, 4) is frozen and staged(on_device, 4) is on_device
    for array, rows in ((writable, 4), (frozen, 6), (writable[:0], 5)):
        copy = staged(array, rows)
        assert copy.shape == (rows, 2, 3) and not copy.flags.writeable and copy.ctypes.data % 64 == 0
        np.testing.assert_array_equal(copy[: len(array)], array)
        assert not copy[len(array) :].any()
    kept = staged(writable, 4)
    writable[:] = np.nan
    assert np.isfinite(kept).all()
    assert frozen_copy(np.ones((3, 0, 2), np.int32), 3).shape == (3, 0, 2)


def test_no_notice_is_given_where_nothing_is_lost():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert host_memory(jax.devices("cpu")[0]) == "ordinary"
        assert host_memory(jax.devices("cpu")[0], pinned=True) == PINNED
