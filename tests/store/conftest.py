"""Random chunks and stores for the store's tests: no model is needed."""

import os

import ml_dtypes
import numpy as np
import pytest

import jfuse
from jfuse.fingerprint import Fingerprint
from jfuse.store import ChunkStore
from jfuse.types import Chunk, LayerKV

FINGERPRINT = Fingerprint("w1", "config", "rope", "tokenizer", "none", "kvzip", (7, 8), 4, "bfloat16")


@pytest.fixture
def fingerprint():
    return FINGERPRINT


@pytest.fixture
def make_chunk():
    def make(seed=0, *, tokens=23, layers=3, heads=2, size=4, dtype=ml_dtypes.bfloat16):
        rng = np.random.default_rng(seed)

        def half():
            return rng.standard_normal((tokens, heads, size), np.float32).astype(dtype)

        kv = tuple(LayerKV(half(), half()) for _ in range(layers))
        score = rng.integers(0, 6, (layers, tokens)).astype(np.float32)  # ties on purpose
        return Chunk(rng.integers(0, 1000, tokens, np.int32), kv, score)

    return make


@pytest.fixture
def same():
    def same(a, b):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.anchor_score, b.anchor_score)
        assert len(a.kv) == len(b.kv)
        for one, other in zip(a.kv, b.kv, strict=True):
            for x, y in zip(one, other, strict=True):
                assert x.dtype == y.dtype and x.shape == y.shape
                assert np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()

    return same


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """Both tiers, which must not differ for the caller."""
    return "memory://" if request.param == "memory" else f"file://{tmp_path / 'store'}"


@pytest.fixture
def store(url, fingerprint):
    return ChunkStore.open(url, fingerprint)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def reopen(folder, fingerprint):
    """Opens the folder anew, as another process would."""

    def reopen(model=fingerprint, **options):
        return ChunkStore.open(f"file://{folder}", model, **options)

    return reopen


# The package's own __init__ imports jax; the modules that touch files do not need it, so that processes start at once.
WITHOUT_JAX = f"""
import os, sys, types
for name in ("jfuse", "jfuse.store"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [os.path.join({os.path.dirname(os.path.dirname(jfuse.__file__))!r}, *name.split("."))]
import ml_dtypes
import numpy as np
from jfuse.fingerprint import Fingerprint
from jfuse.store.entry import Entry
from jfuse.store.layout import encode
from jfuse.store.tier import StoreError
from jfuse.store.urls import tier_at
assert "jax" not in sys.modules

FINGERPRINT = Fingerprint("w1", "config", "rope", "tokenizer", "none", "kvzip", (7, 8), 4, "bfloat16")

def encoded(seed, tokens=300, layers=3):
    rng = np.random.default_rng(seed)
    half = lambda: rng.standard_normal((tokens, 2, 16), np.float32).astype(ml_dtypes.bfloat16)
    kv = [(half(), half()) for _ in range(layers)]
    ids = rng.integers(0, 1000, tokens, np.int32)
    return encode(FINGERPRINT, ids, kv, rng.random((layers, tokens), np.float32))
"""


@pytest.fixture
def without_jax():
    """The head of a program that knows the store's files and `encoded(seed)`, a random chunk, and starts at once."""
    return WITHOUT_JAX
