"""The catalogue of selectors. `__all__` names their functions; `catalogue` is the table, `by_name` builds from it."""

from jfuse.selectors.a3 import a3
from jfuse.selectors.baselines import random, recompute_all, reuse
from jfuse.selectors.cacheblend import cacheblend
from jfuse.selectors.epic import epic
from jfuse.selectors.fusionrag import fusionrag
from jfuse.selectors.learned import learned
from jfuse.selectors.listing import LEFT_OUT, by_name, catalogue
from jfuse.selectors.prophetkv import prophetkv
from jfuse.selectors.qcfuse import qcfuse, qcfuse_demo, qcfuse_layerwise, qcfuse_relaxkv
from jfuse.selectors.relaxkv import (
    global_sparse,
    layerwise_sparse,
    relaxkv,
    relaxkv_full_prefix,
    relaxkv_g,
    target_capacity,
    target_union,
)

__all__ = [
    "LEFT_OUT",
    "a3",
    "by_name",
    "cacheblend",
    "catalogue",
    "epic",
    "fusionrag",
    "global_sparse",
    "layerwise_sparse",
    "learned",
    "prophetkv",
    "qcfuse",
    "qcfuse_demo",
    "qcfuse_layerwise",
    "qcfuse_relaxkv",
    "random",
    "recompute_all",
    "relaxkv",
    "relaxkv_full_prefix",
    "relaxkv_g",
    "reuse",
    "target_capacity",
    "target_union",
]
