"""Longer contexts: by the number of chunks (QCFuse section 4.3, Fig. 12) and by their size (RelaxKV, Table 6)."""

from collections.abc import Sequence

from jfuse.evals.settings import Entry, Settings, Task
from jfuse.evals.studies.parts import Part
from jfuse.evals.tasks import GENERATED

METHODS = ("epic", "cacheblend", "fusionrag", "prophetkv", "qcfuse")


def by_chunk_count(
    counts: Sequence[int] = (2, 4, 8),
    *,
    chunk_tokens: int = 256,
    tasks: Sequence[str] = ("mq", "mv"),
    methods: Sequence[str] = METHODS,
    ratio: float = 0.5,
    limit: int = 12,
    model: str = "smollm2-135m",
    new_tokens: int = 0,
) -> list[Part]:
    """One part per number of chunks; the context grows with it."""
    shapes = [(count, chunk_tokens) for count in counts]
    return _parts(shapes, tasks, methods, ratio, limit, model, new_tokens)


def by_chunk_size(
    sizes: Sequence[int] = (64, 128, 256, 512),
    *,
    length: int = 1024,
    tasks: Sequence[str] = ("mq", "mv"),
    methods: Sequence[str] = (*METHODS, "relaxkv", "relaxkv:window=32"),
    ratio: float = 0.2,
    limit: int = 12,
    model: str = "smollm2-135m",
    new_tokens: int = 0,
) -> list[Part]:
    """One part per chunk size; the context stays as long.

    Raises:
        ValueError: a size that does not divide the context, or a task that has its own passages.
    """
    for size in sizes:
        if not 1 <= size <= length or length % size:
            raise ValueError(f"A chunk size is {size}; use a divisor of {length} tokens, the context's length.")
    shapes = [(length // size, size) for size in sizes]
    return _parts(shapes, tasks, methods, ratio, limit, model, new_tokens)


def _parts(
    shapes: Sequence[tuple[int, int]],
    tasks: Sequence[str],
    methods: Sequence[str],
    ratio: float,
    limit: int,
    model: str,
    new_tokens: int,
) -> list[Part]:
    for name in tasks:
        if name not in GENERATED:
            made = ", ".join(GENERATED)
            raise ValueError(f"Task {name!r} has passages of its own; use one that is made to size: {made}.")
    entries = tuple(Entry(method, (ratio,)) for method in methods)
    parts = []
    for count, size in shapes:
        made = tuple(Task(name, length=count * size, num_chunks=count, new_tokens=new_tokens) for name in tasks)
        columns = {"num_chunks": count, "chunk_tokens": size}
        parts.append(Part(f"{count}x{size}", Settings((model,), made, entries, limit), columns))
    return parts
