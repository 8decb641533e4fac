"""The sections of `gpu.py` about single ops: ceilings of the card, errors, speed, and a search over block sizes."""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from jfuse.config import Implementation
from jfuse.models.rope import angles, default_rope
from jfuse.pallas import attention_mass, place, scatter_rows, selective_attention, selective_attention_triton
from jfuse.types import LayerKV

SHARES = (0.1, 0.3, 0.5, 1.0)
WINDOW = 32


class Op(NamedTuple):
    """One op at one size: `run(implementation)` gives a function of `inputs`, jitted, whose output is arrays."""

    name: str
    run: Callable[[Implementation], Callable[..., Any]]
    inputs: tuple[Any, ...]
    flops: float
    num_bytes: float
    fresh: bool = False  # the first input is used up by the call, and comes back as the output
    visible: jax.Array | None = None  # a restricted context, which torch takes as part of its mask


def seconds(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int, times: int = 10) -> float:
    """Median time of one call, of `times` dispatched together, compilation and a first round left out."""
    wait(call())
    wait(call())
    laps, last = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(times):
            last = call()
        wait(last)
        laps.append((time.perf_counter() - start) / times)
    return float(np.median(laps))


def ceilings(scale: Any) -> dict[str, Any]:
    """What this card reaches in practice: a large product, a copy in its memory, copies to and from the host."""
    n = scale.matrix
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(partial(jnp.dot, preferred_element_type=jnp.bfloat16))
    flops = 2 * n**3 / seconds(lambda: product(a, b), jax.block_until_ready, scale.repeats)
    block = jnp.zeros(scale.copy_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    moved = 2 * block.nbytes / seconds(lambda: copy(block), jax.block_until_ready, scale.repeats)
    host = np.zeros(scale.copy_bytes // 16, np.float32)
    to_device = host.nbytes / seconds(lambda: jax.device_put(host), jax.block_until_ready, scale.repeats, 2)
    return {"product_flops": flops, "copy_bytes": moved, "to_device_bytes": to_device}


def operations(scale: Any, size: int, dtype: Any) -> Iterator[Op]:
    """Every op at the sizes of a request."""
    rng, keys, itemsize = np.random.default_rng(0), scale.context, jnp.dtype(dtype).itemsize
    heads, kv_heads = scale.heads, scale.kv_heads

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    q, k, v = draw(keys, heads, size), draw(keys, kv_heads, size), draw(keys, kv_heads, size)
    every, row_bytes = np.arange(keys, dtype=np.int32), kv_heads * size * itemsize
    visible = jnp.asarray(rng.random(keys) < 0.35)
    rows_of = lambda how, **set: jax.jit(partial(selective_attention, implementation=how, **set))  # noqa: E731
    for share in SHARES:
        at = every if share == 1 else np.sort(rng.choice(every, int(share * keys), replace=False))
        edges, moved = (
            float((at.astype(np.int64) + 1).sum()),
            2 * (keys * row_bytes + len(at) * heads * size * itemsize),
        )
        name, inputs = f"selective_attention {share:.0%} rows", (q[at], k, v, jnp.asarray(at))
        yield Op(name, rows_of, inputs, 4 * size * heads * edges, float(moved))
        if share < 1:
            run = partial(rows_of, visible=visible, window=WINDOW)
            yield Op(f"{name}, restricted", run, inputs, 0.35 * 4 * size * heads * edges, float(moved), visible=visible)
    one = jnp.asarray([keys - 1], jnp.int32)
    yield Op(
        "selective_attention one row", rows_of, (q[:1], k, v, one), 4.0 * size * heads * keys, 2.0 * keys * row_bytes
    )

    rows = scale.query_tokens
    at, scoring = jnp.arange(keys, keys + rows, dtype=jnp.int32), jnp.ones(rows, bool)

    def mass(how: Implementation):
        return jax.jit(
            lambda q, k, at, places, rows: attention_mass(q, k, at, key_positions=places, rows=rows, implementation=how)
        )

    inputs = q[:rows], k, at, jnp.asarray(every), scoring
    yield Op("attention_mass", mass, inputs, 4.0 * rows * keys * heads * size, 2.0 * keys * row_bytes)

    chunk, start = LayerKV(k[: scale.chunk_tokens], v[: scale.chunk_tokens]), np.int32(keys - scale.chunk_tokens)
    table = angles(default_rope(size, 1e4), jnp.arange(scale.chunk_tokens) + start)
    length = np.int32(scale.chunk_tokens)
    run = lambda how: partial(place, implementation=how)  # noqa: E731
    yield Op("place", run, (LayerKV(k, v), chunk, start, length, *table), 0.0, 4.0 * length * row_bytes, True)
    picked = np.sort(rng.choice(every, int(0.3 * keys), replace=False))
    inputs = LayerKV(k, v), jnp.asarray(picked), LayerKV(k[picked], v[picked])
    run = lambda how: jax.jit(partial(scatter_rows, implementation=how), donate_argnums=0)  # noqa: E731
    yield Op("scatter_rows 30%", run, inputs, 0.0, 4.0 * len(picked) * row_bytes, True)


def _own(op: Op) -> tuple[Any, ...]:
    """The inputs, the first copied if the call uses it up."""
    return (jax.tree.map(jnp.copy, op.inputs[0]), *op.inputs[1:]) if op.fresh else op.inputs


def correctness(scale: Any) -> dict[str, Any]:
    """Every op by its kernel against the XLA form on the same values in float32, relative to the largest value."""
    rows = []
    for size, dtype in itertools.product(scale.sizes, (jnp.bfloat16, jnp.float32)):
        for op in operations(scale, size, dtype):
            actual = op.run("pallas")(*_own(op))
            wide = jax.tree.map(
                lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, _own(op)
            )
            with jax.default_matmul_precision("highest"):
                expected = op.run("xla")(*wide)
            pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
            error = max(float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()) for a, b in pairs)
            bound = 2e-2 if dtype == jnp.bfloat16 else 1e-5
            name = jnp.dtype(dtype).name
            rows.append({"op": op.name, "head_size": size, "dtype": name, "error": error, "met": error <= bound})
    return {"rows": rows, "met": all(row["met"] for row in rows)}


def speed(scale: Any) -> dict[str, Any]:
    """Every op in bfloat16 by kernel, by XLA, and by torch where it can; what the kernel reaches a second."""
    rows = []
    for op in operations(scale, scale.sizes[0], jnp.bfloat16):
        row: dict[str, Any] = {"op": op.name}
        hows: tuple[Implementation, ...] = ("pallas", "xla")
        for how in hows:
            row[str(how)] = _guarded(partial(_op_seconds, op, how, scale.repeats))
        if isinstance(row["pallas"], float):
            row |= {"flops": op.flops / row["pallas"], "bytes": op.num_bytes / row["pallas"]}
        rows.append(row | torch_attention(op, scale.repeats))
    return {"rows": rows}


def _op_seconds(op: Op, how: Implementation, repeats: int) -> float:
    run, state = op.run(how), list(_own(op))

    def call() -> Any:
        out = run(*state)
        if op.fresh:
            state[0] = out
        return out

    return seconds(call, jax.block_until_ready, repeats)


def _guarded(measure: Callable[[], float]) -> float | str:
    try:
        return measure()
    except Exception as failure:  # a missing backend must not cost the other columns
        return f"{type(failure).__name__}: {str(failure)[:200]}"


def torch_attention(op: Op, repeats: int) -> dict[str, Any]:
    """The same attention by torch: flash (causal), the explicit mask, and FlexAttention; nothing for other ops."""
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        from torch.nn.functional import scaled_dot_product_attention as sdpa
    except ImportError:
        return {}
    if not op.name.startswith("selective_attention"):
        return {}
    on = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (
        torch.from_numpy(np.array(a.astype(jnp.float32))).to(on, torch.bfloat16).transpose(0, 1)[None].contiguous()
        for a in op.inputs[:3]
    )
    at, places = torch.from_numpy(np.array(op.inputs[3])).to(on), torch.arange(k.shape[2], device=on)
    mask = places[None] <= at[:, None]
    if op.visible is not None:
        mask &= torch.from_numpy(np.array(op.visible)).to(on)[None] | (at[:, None] - places[None] <= WINDOW)
    wait = (lambda _: torch.cuda.synchronize()) if on == "cuda" else (lambda _: None)

    def timed(call: Callable[[], Any]) -> float | str:
        with torch.inference_mode():
            return _guarded(lambda: seconds(call, wait, repeats))

    found = {"torch_mask": timed(lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True))}
    if len(at) == len(places):
        found["torch_causal"] = timed(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True))
    if on == "cuda":
        flex: Any = torch.compile(flex_attention)

        def by_blocks() -> float:
            blocks = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, len(at), len(places), device=on)
            return seconds(lambda: flex(q, k, v, block_mask=blocks, enable_gqa=True), wait, repeats)

        with torch.inference_mode():
            found["torch_flex"] = _guarded(by_blocks)
    return found


def block_search(scale: Any, deadline: float) -> dict[str, Any]:
    """`selective_attention` at 30 % of the rows over tiles, warps and stages; the best first."""
    op = next(op for op in operations(scale, scale.sizes[0], jnp.bfloat16) if "30%" in op.name)
    at = jnp.arange(scale.context, dtype=jnp.int32)
    arguments = *op.inputs, at, None, jnp.int32(0)
    tried = [(16, 16, 4, 2)] if scale.miniature else itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    rows = []
    for tile in tried:
        if time.monotonic() > deadline:
            break
        with patch.object(selective_attention_triton, "tile", lambda *_, tile=tile: tile):
            run = jax.jit(partial(selective_attention_triton.selective_attention_triton, interpret=scale.miniature))
            taken = _guarded(lambda run=run: seconds(lambda: run(*arguments), jax.block_until_ready, scale.repeats))
        rows.append(dict(zip(("rows", "keys", "warps", "stages"), tile, strict=True)) | {"seconds": taken})
    return {"rows": sorted(rows, key=lambda row: row["seconds"] if isinstance(row["seconds"], float) else np.inf)}
