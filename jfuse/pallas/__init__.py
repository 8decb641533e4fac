"""The array operations that decide speed: one op, one file, the plain XLA definition first."""

from jfuse.pallas.attention_mass import attention_mass, log_mass
from jfuse.pallas.place import place
from jfuse.pallas.rotate import rotate
from jfuse.pallas.scatter_rows import scatter_rows
from jfuse.pallas.selective_attention import attend, merge, partial_attention, selective_attention
from jfuse.pallas.soft_attention import soft_attention

__all__ = [
    "attend",
    "attention_mass",
    "log_mass",
    "merge",
    "partial_attention",
    "place",
    "rotate",
    "scatter_rows",
    "selective_attention",
    "soft_attention",
]
