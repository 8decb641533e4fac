"""The section of `gpu.py` about whole models: time to first token of every method, with random weights."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jfuse
from jfuse import selectors
from jfuse.config import FusionConfig
from jfuse.evals.latency import interleave, summary
from jfuse.host_tier import HostTier
from jfuse.models.config import ModelConfig
from jfuse.models.decoder import Model
from jfuse.models.params import build_params
from jfuse.pipeline import Question, full_prefill, serve
from jfuse.sources import ResidentChunks, Source, StoredChunks
from jfuse.stitch import make_layout


def random_model(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Model:
    """A model of that shape, drawn on the device, where 8 billion numbers take a second."""

    @partial(jax.jit, static_argnames="shape")
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, dtype) / np.sqrt(shape[-2] if len(shape) > 1 else 1).astype(dtype)

    def leaf(path: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
        if path[-1] == "scale":
            return jnp.ones(shape, dtype)
        return draw(jax.random.key(abs(hash(path)) % 2**31), shape)

    return Model(config, build_params(config, leaf), weights_id="random")


def ttft(scale: Any, name: str, config: ModelConfig, deadline: float) -> dict[str, Any]:
    """Full prefill, Hugging Face's, reuse, and three methods at several ratios, cache-ready and from the host tier."""
    model = random_model(config)
    rng = np.random.default_rng(0)
    tokens = lambda count: rng.integers(0, config.vocab_size, count).astype(np.int32)  # noqa: E731
    pieces = [tokens(scale.chunk_tokens) for _ in range(scale.chunks)]
    question = Question(tokens(scale.query_tokens))
    layout = make_layout(pieces, pad_to=scale.pad_to)
    store = jfuse.ChunkStore.open("memory://", model)
    chunks = [jfuse.encode_chunk(model, piece) for piece in pieces]
    ids = [store.put(chunk) for chunk in chunks]
    host = HostTier(store)
    host.load(ids)
    sources: dict[str, Callable[[], Source]] = {
        "ready": partial(lambda resident: resident, ResidentChunks(chunks)),
        "host": partial(StoredChunks, store, ids, host=host),
    }
    middle = config.num_layers // 2
    critical = tuple(sorted({max(middle - 2, 0), middle, min(middle + 2, config.num_layers - 1)}))
    methods = {"qcfuse": selectors.qcfuse(critical), "prophetkv": selectors.prophetkv()}
    stages: dict[str, dict[str, float]] = {}

    def full() -> None:
        int(np.argmax(full_prefill(model, layout, question).first))

    def fused(key: str, source: Callable[[], Source], selector: Any, ratio: float, row_block: int) -> None:
        settings = FusionConfig(ratio=ratio, pad_to=scale.pad_to, row_block=row_block)
        out = serve(model, source(), question, selector, settings)
        int(np.argmax(out.first))
        stages[key] = out.stages

    variants: dict[str, Callable[[], object]] = {}
    for where, source in sources.items():
        variants[f"reuse 0 {where}"] = partial(fused, f"reuse 0 {where}", source, selectors.reuse(), 0.0, 1)
    for ratio in scale.ratios:
        for (method, selector), (where, source) in ((m, s) for m in methods.items() for s in sources.items()):
            key = f"{method} {ratio} {where}"
            variants[key] = partial(fused, key, source, selector, ratio, scale.row_block)
    for where, source in sources.items():  # its sets shrink layer by layer: wide buckets compile fewer sizes
        key = f"relaxkv 0.15 {where}"
        variants[key] = partial(fused, key, source, selectors.relaxkv(), 0.15, 8 * scale.row_block)
    baselines = {"full prefill": full} | hugging_face(config, layout.tokens[: layout.end], question.tokens)

    rows: list[dict[str, Any]] = []
    for group in (baselines, *({key: run} for key, run in variants.items())):
        for key, run in group.items():
            if time.monotonic() > deadline:
                rows.append({"variant": key, "skipped": "out of time"})
                continue
            try:
                spread = summary(interleave({key: run}, repeats=scale.repeats, warm_up=2)[key])
            except Exception as failure:  # one method must not cost the others
                rows.append({"variant": key, "error": f"{type(failure).__name__}: {str(failure)[:300]}"})
                continue
            rows.append({"variant": key, "median": spread["median"], "q25": spread["q25"], "q75": spread["q75"]})
            rows[-1] |= {f"{stage}_seconds": taken for stage, taken in stages.get(key, {}).items()}
    medians = {row["variant"]: row["median"] for row in rows if "median" in row}
    for row in rows:
        for baseline in baselines:
            if "median" in row and baseline in medians:
                row[f"over {baseline}"] = medians[baseline] / row["median"]
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"model": name, "context": layout.end, "query": len(question.tokens), "peak_bytes": peak, "rows": rows}


def hugging_face(config: ModelConfig, context: np.ndarray, query: np.ndarray) -> dict[str, Callable[[], object]]:
    """A full prefill of the same shape by transformers with sdpa; empty where torch is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return {}
    kinds = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    described = kinds[config.family](
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_positions,
    )
    on = "cuda" if torch.cuda.is_available() else "cpu"
    made: list[Any] = []

    def run() -> None:
        if not made:  # in the warm-up, so that a failure is this variant's alone
            with torch.device(on):
                build = transformers.AutoModelForCausalLM.from_config
                made.append(build(described, dtype=torch.bfloat16, attn_implementation="sdpa").eval())
        ids = torch.from_numpy(np.concatenate([context, query]).astype(np.int64))[None].to(on)
        with torch.inference_mode():
            int(made[0](ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

    return {"Hugging Face full prefill": run}
