"""jfuse: RAG KV-cache fusion in JAX.

Each retrieved passage's cache is computed once, alone; a request stitches the caches, recomputes the few positions that
the question needs, and answers. Grouped by phase: models, offline, online, measuring.
"""

from jfuse import anchors, selectors
from jfuse.chat import chat_request
from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig, View, budget
from jfuse.evals.profiling import profile_layers
from jfuse.fuse import cache_error, fuse, fusion_work, soft_fuse
from jfuse.generate import generate
from jfuse.models.decoder import Model, prefill
from jfuse.models.resolve import load_model
from jfuse.offload import prefetch
from jfuse.pipeline import Answer, Question, answer, encode_prefix, full_prefill, serve
from jfuse.probe import probe
from jfuse.profile import LayerProfile, load_profile
from jfuse.report import Report
from jfuse.selectors.base import Selector, budget_for, select
from jfuse.selectors.topk import perturbed, soft_top_k, straight_through, top_k
from jfuse.stitch import make_layout, stitch, stitch_anchors
from jfuse.store import ChunkStore
from jfuse.types import AnchorCache, Chunk, ContextCache, Evidence, LayerKV, Selection

__all__ = [
    "AnchorCache",
    "Answer",
    "Chunk",
    "ChunkStore",
    "ContextCache",
    "Evidence",
    "FusionConfig",
    "LayerKV",
    "LayerProfile",
    "Model",
    "Question",
    "Report",
    "Selection",
    "Selector",
    "View",
    "anchors",
    "answer",
    "budget",
    "budget_for",
    "cache_error",
    "chat_request",
    "encode_chunk",
    "encode_prefix",
    "full_prefill",
    "fuse",
    "fusion_work",
    "generate",
    "load_model",
    "load_profile",
    "make_layout",
    "perturbed",
    "prefetch",
    "prefill",
    "probe",
    "profile_layers",
    "select",
    "selectors",
    "serve",
    "soft_fuse",
    "soft_top_k",
    "stitch",
    "stitch_anchors",
    "straight_through",
    "top_k",
]
