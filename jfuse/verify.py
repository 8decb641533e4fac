"""Runs the exact identities of fusion on a given model: a correctness gate before any of its answers is trusted.

In come a model and the selectors to try; out comes one `Check` per identity, with the error found. Everything runs in
float32 on a short request of random tokens, by the functions that serve requests, so that a wrong RoPE scaling, a
misread checkpoint layout or a broken kernel shows as a failed check rather than as odd answers.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig, context_bucket
from jfuse.fuse import fuse
from jfuse.generate import prefill_query
from jfuse.models.config import ModelConfig
from jfuse.models.decoder import Model, Params, finish, logits, project
from jfuse.pipeline import Question, ResidentChunks, Served, encode_prefix, full_prefill, serve
from jfuse.selectors.allocate import everything, nothing
from jfuse.selectors.base import Selector
from jfuse.selectors.baselines import random, recompute_all, reuse
from jfuse.selectors.qcfuse import qcfuse
from jfuse.stitch import make_layout, prefix_tokens, stitch
from jfuse.types import Chunk, ContextCache, KVCache, LayerKV, Selection

IDENTITIES: dict[str, str] = {
    "ID-1": "ratio 1 equals full prefill",
    "ID-2": "ratio 0 is the stitched cache, bit for bit, and recomputes nothing",
    "ID-3": "a single chunk without prefix equals full prefill at any ratio",
    "ID-4": "recomputing all chunks but the first, without prefix, equals full prefill",
    "ID-5": "keys and values of layer 0, once placed, are those of a full prefill",
    "ID-7": "positions that are not selected keep their entries, bit for bit",
}
KV_TOLERANCE, LOGIT_TOLERANCE = 1e-5, 1e-4
RATIO = 0.3
CHUNKS, PREFIX, QUERY = (70, 33, 1, 96), 13, 17
INSTRUCTION = 64  # room for what an anchor rule runs after a chunk
PAD_TO, ROW_BLOCK = 256, 128


@dataclass(frozen=True)
class Check:
    """One identity, tried once.

    Attributes:
        id: which identity; `IDENTITIES` lists them.
        meaning: what was compared, in one line.
        selector: the method it was tried with, or None where none is involved.
        error: the relative L2 distance found, of the worst layer's keys or values, or of the logits; NaN fails.
        tolerance: the largest error that counts as float noise; 0 demands equal bits.
    """

    id: str
    meaning: str
    selector: str | None
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the identity holds."""
        return self.error <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an error that is no number becomes None."""
        return asdict(self) | {"error": self.error if np.isfinite(self.error) else None, "passed": self.passed}


def verify(model: Model, *, selectors: Sequence[Selector] | None = None, seed: int = 0) -> tuple[Check, ...]:
    """Tries the identities ID-1 to ID-5 and ID-7 on this model, always in float32.

    Args:
        selectors: `qcfuse`, `random`, `reuse` and `recompute_all` by default.
        seed: of the request's token ids.

    Raises:
        ValueError: the model serves fewer positions than a request needs.
    """
    selectors = default_selectors(model.config.num_layers) if selectors is None else selectors
    with jax.default_matmul_precision("highest"):
        exact = replace(model, params=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params))
        rng = np.random.default_rng(seed)
        case, single, bare = _requests(exact, rng)
        return (
            *_full_prefill_is_dense(case),
            *(check for selector in selectors for check in _of_selector(selector, case, single)),
            *_all_but_first(bare),
            *_layer_zero(case),
        )


def default_selectors(num_layers: int) -> tuple[Selector, ...]:
    """The method, the control and the two ends; `qcfuse` scores layers at a third, a half and two thirds of the depth.

    >>> [selector.name for selector in default_selectors(4)]
    ['qcfuse', 'random', 'reuse', 'recompute_all']
    """
    layers = tuple(sorted({num_layers // 3, num_layers // 2, 2 * num_layers // 3}))
    return qcfuse(layers), random(), reuse(), recompute_all()


class Case(NamedTuple):
    """A request, its stitched cache and its full prefill."""

    model: Model
    chunks: tuple[Chunk, ...]
    prefix: ContextCache | None
    question: Question
    pad_to: int
    stitched: ContextCache
    full: ContextCache
    first: Float[Array, " V"]  # full prefill's logits of the first answer token

    def serve(self, selector: Selector, ratio: float) -> Served | None:
        """The request as a user would run it; None where scores are not finite, so that nothing could be selected."""
        source = ResidentChunks(self.chunks, selector.view.anchor_ratio)
        config = FusionConfig(ratio, self.pad_to, ROW_BLOCK)
        try:
            return serve(self.model, source, self.question, selector, config, prefix=self.prefix)
        except FloatingPointError:
            return None


def _requests(model: Model, rng: np.random.Generator) -> tuple[Case, Case, Case]:
    """Four chunks after a prefix; one of them alone; three without a prefix."""
    lengths = request_lengths(model.config.max_positions)
    model.config.check_length(sum(lengths) + INSTRUCTION)
    *pieces, head, question = (rng.integers(0, model.config.vocab_size, n).astype(np.int32) for n in lengths)
    chunks = tuple(encode_chunk(model, tokens) for tokens in pieces)
    prefix, question = encode_prefix(model, head), Question(question)
    return (
        _case(model, chunks, prefix, question),
        _case(model, chunks[:1], None, question),
        _case(model, chunks[:3], None, question),
    )


def request_lengths(max_positions: int) -> list[int]:
    """Tokens of the chunks, the prefix and the query: less where a model serves few positions.

    >>> request_lengths(8192), request_lengths(164)
    ([70, 33, 1, 96, 13, 17], [30, 14, 1, 41, 5, 7])
    """
    lengths = (*CHUNKS, PREFIX, QUERY)
    room = max_positions - INSTRUCTION
    return [max(1, min(n, n * room // sum(lengths))) for n in lengths]


def _case(model: Model, chunks: tuple[Chunk, ...], prefix: ContextCache | None, question: Question) -> Case:
    """Every case is padded to one length, prefix included, so that each function compiles as seldom as can be."""
    pad_to = PAD_TO if prefix is not None else context_bucket(PREFIX, 1, PAD_TO)
    stitched = stitch(chunks, model.config.rope, prefix=prefix, pad_to=pad_to)
    layout = make_layout([chunk.tokens for chunk in chunks], prefix_tokens(prefix), pad_to=pad_to)
    full = full_prefill(model, layout, question)
    return Case(model, chunks, prefix, question, pad_to, stitched, full.context, full.first)


def _full_prefill_is_dense(case: Case) -> Iterator[Check]:
    """What everything else is held against must itself be right: whole score matrices find the same."""
    tokens = np.concatenate([case.full.tokens[: case.full.end], case.question.tokens])
    kv, scores = dense_prefill(case.model, tokens)
    meaning, end = "full prefill equals a dense pass with whole score matrices", case.full.end
    yield Check("ID-1", f"{meaning}: keys and values", None, _kv_error(case.full.kv, kv, end), KV_TOLERANCE)
    yield Check("ID-1", f"{meaning}: logits", None, _relative(case.first, scores), LOGIT_TOLERANCE)


def _of_selector(selector: Selector, case: Case, single: Case) -> Iterator[Check]:
    """The identities that involve a selector. `reuse` has no ratio 1, `recompute_all` no ratio 0."""
    if selector.allocate is not nothing:
        yield from _equals_full("ID-1", selector.name, case, [case.serve(selector, 1.0)])
    if selector.allocate is not everything:
        yield Check("ID-2", IDENTITIES["ID-2"], selector.name, _reuse_error(case, case.serve(selector, 0.0)), 0.0)
    alone = [single.serve(selector, ratio) for ratio in (0.0, RATIO, 1.0)]
    # Rows that see less than all before them (RelaxKV) differ from full prefill by design.
    seeing = [run for run in alone if run is None or not any(run.work.rows) or np.asarray(run.selection.visible).all()]
    yield from _equals_full("ID-3", selector.name, single, seeing)
    yield Check("ID-7", IDENTITIES["ID-7"], selector.name, _kept_error(case, case.serve(selector, RATIO)), 0.0)


def _equals_full(id: str, name: str | None, case: Case, runs: Sequence[Served | None]) -> Iterator[Check]:
    kv = [np.nan if run is None else _kv_error(run.context.kv, case.full.kv, case.full.end) for run in runs]
    first = [np.nan if run is None else _relative(run.first, case.first) for run in runs]
    yield Check(id, f"{IDENTITIES[id]}: keys and values", name, float(np.max(kv)), KV_TOLERANCE)
    yield Check(id, f"{IDENTITIES[id]}: logits", name, float(np.max(first)), LOGIT_TOLERANCE)


def _reuse_error(case: Case, run: Served | None) -> float:
    """Difference from the stitched cache; a row that ran, even to no effect, counts as an error of 1."""
    if run is None:
        return np.nan
    return max(_bit_error(run.context.kv, case.stitched.kv), float(any(run.work.rows)))


def _kept_error(case: Case, run: Served | None) -> float:
    if run is None:
        return np.nan
    return _bit_error(run.context.kv, case.stitched.kv, ~np.asarray(run.selection.recompute))


def _all_but_first(case: Case) -> Iterator[Check]:
    segments = np.asarray(case.stitched.segments)
    recompute = np.broadcast_to(segments > 0, (case.model.config.num_layers, len(segments)))
    selection = Selection(recompute, np.ones((1, len(segments)), bool), np.int32(0))
    fused = fuse(case.model, case.stitched, selection, row_block=ROW_BLOCK)
    first, _ = prefill_query(case.model, fused, case.question.tokens)
    kv = _kv_error(fused.kv, case.full.kv, case.full.end)
    yield Check("ID-4", f"{IDENTITIES['ID-4']}: keys and values", None, kv, KV_TOLERANCE)
    yield Check("ID-4", f"{IDENTITIES['ID-4']}: logits", None, _relative(first, case.first), LOGIT_TOLERANCE)


def _layer_zero(case: Case) -> Iterator[Check]:
    error = _kv_error(case.stitched.kv[:1], case.full.kv[:1], case.full.end)
    yield Check("ID-5", IDENTITIES["ID-5"], None, error, KV_TOLERANCE)


def dense_prefill(model: Model, tokens: Int[np.ndarray, " T"]) -> tuple[KVCache, Float[Array, " V"]]:
    """Rotated keys and values of all layers and the last token's logits, by a plain causal pass from position 0.

    It shares only the projections with the decoder: the rotation is written out, and attention is that of `jax.nn`.
    """
    config = model.config
    phase = np.arange(len(tokens), dtype=np.float32)[:, None] * np.asarray(config.rope.inv_freq, np.float32)
    turns = np.exp(1j * phase.astype(np.float64)) * config.rope.attention_factor
    table = jnp.asarray(turns.real, jnp.float32), jnp.asarray(turns.imag, jnp.float32)
    x, kv = model.params["embed"]["table"][tokens], []
    for block in model.layers:
        x, layer = _dense_layer(config, block, x, *table)
        kv.append(layer)
    return tuple(kv), logits(config, model.params, x[-1:])[0]


@functools.partial(jax.jit, static_argnames="config")
def _dense_layer(
    config: ModelConfig, block: Params, x: Float[Array, "T D"], cos: Float[Array, "T F"], sin: Float[Array, "T F"]
) -> tuple[Float[Array, "T D"], LayerKV]:
    half = cos.shape[1]

    def turn(heads: Float[Array, "T _ H"]) -> Float[Array, "T _ H"]:
        a, b, rest = jnp.split(heads, [half, 2 * half], axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)

    q, k, v = project(config, block, x)
    k = turn(k)
    attended = jax.nn.dot_product_attention(turn(q)[None], k[None], v[None], is_causal=True)[0]
    return finish(config, block, x, attended), LayerKV(k, v)


def _kv_error(ours: Any, theirs: KVCache, end: int) -> float:
    """The largest error of any layer's keys or values over the first `end` positions."""
    errors = [
        _relative(np.asarray(a)[:end], np.asarray(b)[:end])
        for layers in zip(ours, theirs, strict=True)
        for a, b in zip(*layers, strict=True)
    ]
    return float(np.max(errors))


def _relative(a: Any, b: Any) -> float:
    """The L2 distance as a share of the norm of `b`; NaN stays NaN.

    A single sensitive entry of a deep model may be off by more than float noise; a wrong row is off by its own size.
    """
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return float(np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel()))


def _bit_error(ours: Any, theirs: KVCache, where: Bool[np.ndarray, "L S"] | None = None) -> float:
    """The largest difference at positions `where`; 0 only if all bits are equal."""
    errors = [0.0]
    for l, layers in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(*layers, strict=True):
            a, b = (np.asarray(x) if where is None else np.asarray(x)[where[l]] for x in (a, b))
            if a.tobytes() != b.tobytes():
                with np.errstate(invalid="ignore"):
                    errors.append(max(float(np.abs(a - b).max()), float(np.finfo(np.float32).tiny)))
    return float(np.max(errors))
