"""The catalogue of selectors. `__all__` is the registry: tests, command line and sweeps read it."""

from jfuse.selectors.baselines import random, recompute_all, reuse
from jfuse.selectors.qcfuse import qcfuse

__all__ = ["qcfuse", "random", "recompute_all", "reuse"]
