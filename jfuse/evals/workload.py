"""The samples that a task of an evaluation asks, and what identifies them.

In go a `Task` and a tokenizer; out come `Sample`s in a fixed order, of which any prefix is the same in every run.
"""

import dataclasses
import hashlib
from typing import Any

from jfuse.evals.data import QA_INSTRUCTION, Sample, read_samples
from jfuse.evals.prompts import Prompt, make_prompt
from jfuse.evals.ruler import needle_sample
from jfuse.evals.settings import Task
from jfuse.evals.spans import split_chunks
from jfuse.models.tokenizer import Tokenizer

EXAMPLE = f"""{QA_INSTRUCTION}

Amber Bridge
The Amber Bridge crosses the river Lune at Halden. It was opened to traffic in 1907 and rebuilt in stone in 1931. Its \
architect, Ada Holm, also drew the town hall.

Question: Who designed the bridge that crosses the Lune at Halden?
Answer: Ada Holm

"""
"""One worked example, made up, so that it answers no question of any data set. Small models hardly use passages
without one."""


def draw(task: Task, tokenizer: Tokenizer, limit: int) -> list[Sample]:
    """The first `limit` samples of a task; fewer if its file has fewer.

    Raises:
        ValueError: a file without a row at `task.first`.
    """
    if task.path is None:
        options = {"length": task.length, "num_chunks": task.num_chunks, "encode": tokenizer.encode}
        return [needle_sample(task.name, seed, **options) for seed in range(task.first, task.first + limit)]
    samples = read_samples(task.path, limit=task.first + limit)[task.first :]
    if not samples:
        raise ValueError(f"{task.path.name}, the data of task {task.name!r}, has no row {task.first}; lower `first`.")
    if task.chunk_tokens is None:
        return samples
    return [split_chunks(sample, lambda text: _pieces(text, tokenizer, task.chunk_tokens or 1)) for sample in samples]


def _pieces(text: str, tokenizer: Tokenizer, size: int) -> list[str]:
    """The text cut after every `size` tokens, as evenly as that allows."""
    offsets = tokenizer.offsets(text)
    count = -(-len(offsets) // size)
    cuts = [offsets[len(offsets) * part // count][0] for part in range(1, count)]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def prompt_of(task: Task, sample: Sample, tokenizer: Tokenizer) -> Prompt:
    """The sample's tokens, behind a worked example where the task asks for one."""
    wanted = sample.scoring == "any" if task.example is None else task.example
    return make_prompt(sample, tokenizer, example=EXAMPLE if wanted else "")


def identity(task: Task, first: Sample) -> dict[str, Any]:
    """Everything that decides the task's samples and prompts, as plain values; a file by its checksum.

    Args:
        first: the task's first sample, so that a generator that has changed is found out.
    """
    fields = dataclasses.asdict(task) | {"example_sha256": _sha256(EXAMPLE.encode())}
    fields |= {"first_sha256": _sha256(repr(first).encode())}
    if task.path is not None:
        fields |= {"data": task.path.name, "data_sha256": _sha256(task.path.read_bytes())}
    return fields


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
