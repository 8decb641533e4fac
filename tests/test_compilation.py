"""Requests of any length share a bounded number of compiled shapes (K-06, pitfall 53), and processes share them too."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jfuse import pipeline
from jfuse.config import FusionConfig
from jfuse.fuse import _fuse_layer_donating
from jfuse.models.decoder import keys_values, layer
from jfuse.models.tiny import tiny_model
from jfuse.pipeline import Question, ResidentChunks, serve
from jfuse.report import Compilations
from jfuse.selectors import qcfuse
from jfuse.selectors.base import _select
from jfuse.types import Chunk, LayerKV


def random_request(rng, config):
    """1 to 20 chunks, 100 to 4,096 context tokens in all; caches are drawn, since only shapes matter here."""
    total, count = int(rng.integers(100, 4097)), int(rng.integers(1, 21))
    cuts = np.sort(rng.choice(np.arange(1, total), count - 1, replace=False))
    shape = (config.num_kv_heads, config.head_size)
    chunks = []
    for length in np.diff([0, *cuts, total]):
        kv = tuple(
            LayerKV(*(rng.standard_normal((length, *shape)).astype(np.float32) for _ in "kv"))
            for _ in range(config.num_layers)
        )
        tokens = rng.integers(0, config.vocab_size, length).astype(np.int32)
        chunks.append(Chunk(tokens, kv, rng.random((config.num_layers, length), np.float32)))
    query = rng.integers(0, config.vocab_size, int(rng.integers(1, 65))).astype(np.int32)
    return ResidentChunks(chunks), Question(query)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_forty_requests_stay_within_the_buckets_and_a_second_round_compiles_nothing(ratio):
    model = tiny_model(jax.random.key(0), num_layers=3, max_positions=8192)
    config = model.config
    prefix = pipeline.encode_prefix(model, np.arange(9))
    selector = qcfuse((1, 2))
    jax.clear_caches()

    def serve_all():
        rng = np.random.default_rng(7)
        for _ in range(40):
            source, question = random_request(rng, config)
            serve(model, source, question, selector, FusionConfig(ratio=ratio), prefix=prefix)

    serve_all()
    counts = {
        "probe": keys_values._cache_size(),
        "select": _select._cache_size(),
        "fused layer": _fuse_layer_donating._cache_size(),
        "layer, probe and query": layer._cache_size(),
    }
    assert counts["probe"] <= 8 and counts["select"] <= 8, counts
    assert counts["fused layer"] <= 24 and counts["layer, probe and query"] <= 24, counts
    assert min(counts.values()) >= 1, "the counters look at functions that this path does not use"
    with Compilations() as compiled:
        serve_all()
    assert compiled.count == 0


PROGRAM = """
import jax
import numpy as np
import jfuse as jf
from jfuse.models.tiny import tiny_model

model = tiny_model(jax.random.key(0), num_layers=3)
store = jf.ChunkStore.open("memory://", model)
passages = [np.arange(length, dtype=np.int32) for length in (21, 34)]
prefix = jf.encode_prefix(model, np.arange(5))
config = jf.FusionConfig(0.3, pad_to=64, row_block=32)
for selector in (jf.selectors.qcfuse((1, 2)), jf.selectors.relaxkv()):
    question = jf.pipeline.Question(np.arange(7, 12, dtype=np.int32))
    found = jf.answer(model, store, passages, question, selector, config, prefix=prefix, max_new_tokens=2)
    print(found.tokens.tolist())
"""


@pytest.mark.slow
def test_a_second_process_finds_every_program_in_the_compilation_cache(tmp_path):
    """K-14: what is compiled depends on no order of hashes and no address, so jax's persistent cache misses nothing."""
    kept, printed = [], []
    for seed in ("1", "2"):
        settings = {
            "PYTHONHASHSEED": seed,
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=os.environ | settings, capture_output=True, text=True, check=True
        )
        printed.append(run.stdout)
        kept.append({path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")})
    assert len(kept[0]) > 5, "the cache is in use"
    assert kept[1] == kept[0], f"compiled again: {sorted(kept[1] - kept[0])}"
    assert printed[0] == printed[1]
