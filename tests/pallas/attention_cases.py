"""The shapes over which every kernel of selective attention is compared with dense float64 attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfuse.types import PAD_POSITION
from tests.reference import attention, scores


class Case(NamedTuple):
    """One call. `order` is how rows and keys lie: by position, shuffled, or keys with gaps between their positions."""

    rows: int
    keys: int
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    dtype: str = "float32"
    visible: float | None = None  # share of the keys
    window: int = 0
    padding: int = 0  # of the rows and of the keys
    order: str = "sorted"

    def __str__(self):
        parts = [f"{self.rows}x{self.keys}", f"{self.heads}over{self.kv_heads}x{self.size}", self.dtype]
        parts += [] if self.visible is None else [f"visible{self.visible}window{self.window}"]
        return "-".join(parts + ([f"padding{self.padding}"] if self.padding else []) + [self.order])


QUICK = [
    Case(1, 1),  # one row, one key (K-01, K-04)
    Case(13, 97, 8, 1, 16),  # primes; all heads share one KV head
    Case(70, 301, dtype="bfloat16", visible=0.3, window=7, padding=9),
    Case(31, 130, 6, 2, 80, visible=0.3, window=300),  # a head size that is no power of two (K-02)
    Case(9, 129, 3, 3, 96, "bfloat16", visible=0.0),  # each row sees itself alone
    Case(66, 130, 8, 2, 16, padding=3, order="shuffled"),
    Case(17, 257, 4, 4, 16, order="gaps"),
]

# K-13: one kernel function under grids of 2, 5, 3 and 4 blocks of rows (two heads a group, 32 to a block)
GRIDS = [Case(rows, 70, 2, 1, 16) for rows in (32, 80, 48, 64)]

FULL = [
    # K-01: lengths around the blocks, as many rows as keys
    *(Case(n, n, size=16) for n in (17, 127, 129, 192)),
    *(Case(*shape, size=32) for shape in ((1, 7), (1, 4092), (2, 513), (64, 64), (128, 256), (65, 4092))),
    # K-02: head sizes, both dtypes
    *(
        Case(37, 139, size=size, dtype=dtype)
        for size in (64, 72, 80, 96, 128, 256)
        for dtype in ("float32", "bfloat16")
    ),
    *(Case(37, 139, size=size, dtype="bfloat16", visible=0.35, window=32) for size in (64, 96, 128, 256)),
    # K-03: groups of 1, 8, 7, 4, 3 and 5 query heads
    *(Case(5, 67, heads, kv, 32) for heads, kv in ((12, 12), (8, 1), (28, 4), (40, 10), (9, 3), (15, 3))),
    *(Case(50, 67, heads, kv, 32, "bfloat16", padding=4) for heads, kv in ((12, 12), (8, 1), (28, 4), (40, 10))),
    # visible sets and windows, with and without padding
    *(Case(70, 301, size=32, visible=share, window=window) for share in (0.0, 0.35, 1.0) for window in (0, 1, 32, 400)),
    *(Case(70, 301, size=32, visible=share, window=9, padding=20) for share in (0.0, 0.1, 0.9)),
    *(Case(33, 300, size=32, visible=0.3, window=5, order=order) for order in ("shuffled", "gaps")),
    # ragged: many padding rows and keys, more rows than keys, rows before every key
    *(
        Case(rows, keys, size=32, padding=padding)
        for rows, keys, padding in ((64, 64, 63), (130, 30, 29), (40, 200, 20))
    ),
    *GRIDS,
    *(Case(rows, 70, 2, 1, 16, "bfloat16") for rows in (64, 160, 96, 128)),
]


class Drawn(NamedTuple):
    """Arguments of the op, in the order of its definition."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    row_positions: jax.Array
    key_positions: jax.Array
    visible: jax.Array | None
    window: jax.Array


def draw(case: Case) -> Drawn:
    """Random arguments; rows stand at distinct key positions as far as there are any, one row before every key."""
    rng = np.random.default_rng([case.rows, case.keys, case.heads, case.size])
    shapes = (case.rows, case.heads), (case.keys, case.kv_heads), (case.keys, case.kv_heads)
    q, k, v = (jnp.asarray(rng.standard_normal((*shape, case.size), np.float32), case.dtype) for shape in shapes)
    places = np.arange(case.keys, dtype=np.int32)
    if case.order == "gaps":
        places = np.sort(rng.choice(3 * case.keys, case.keys, replace=False)).astype(np.int32) + 5
    at = np.sort(rng.choice(places, case.rows, replace=case.rows > case.keys)).astype(np.int32)
    if case.rows > 30:
        at[0] = -1  # sees nothing
    if case.padding:
        at[case.rows - min(case.padding, case.rows - 1) :] = PAD_POSITION
        places[case.keys - min(case.padding, case.keys - 1) :] = PAD_POSITION
    if case.order == "shuffled":
        order = rng.permutation(case.keys)
        at, places, k, v = rng.permutation(at), places[order], k[order], v[order]
    visible = None if case.visible is None else jnp.asarray(rng.random(case.keys) < case.visible)
    return Drawn(q, k, v, jnp.asarray(at), jnp.asarray(places), visible, jnp.int32(case.window))


def mask(drawn: Drawn) -> np.ndarray:
    """Which key each row reads, [R, S], from the sentence in the op's docstring."""
    at, places = (np.asarray(a, np.int64) for a in (drawn.row_positions, drawn.key_positions))
    away = np.subtract.outer(at, places)
    keep = (away >= 0) & (at < PAD_POSITION)[:, None]
    return keep if drawn.visible is None else keep & (np.asarray(drawn.visible) | (away <= int(drawn.window)))


def assert_equal_to_dense(out, lse, drawn: Drawn):
    """Within 1e-5 (float32) or 2e-2 (bfloat16) of the largest value; zeros and -1e30 where a row sees nothing."""
    q, k, v = (np.asarray(a).astype(np.float64) for a in drawn[:3])
    keep = mask(drawn)
    some, bound = keep.any(-1), 2e-2 if drawn.q.dtype == jnp.bfloat16 else 1e-5
    expected = attention(q, k, v, keep)
    assert out.dtype == drawn.v.dtype and lse.dtype == jnp.float32 and lse.shape == out.shape[:2]
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * max(np.abs(expected).max(), 1e-30))
    assert not out[~some].any() and (lse[~some] == np.float32(-1e30)).all()
    with np.errstate(divide="ignore"):
        exact = np.log((np.exp(scores(q, k)) * keep).sum(-1)).T[some]
    np.testing.assert_allclose(lse[some], exact, rtol=bound, atol=bound)
