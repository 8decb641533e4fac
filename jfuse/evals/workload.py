"""The samples that a task of an evaluation asks, and what identifies them.

In go a `Task` and a tokenizer; out come `Sample`s in a fixed order, of which any prefix is the same in every run.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from jfuse.evals.data import QA_INSTRUCTION, Sample, Span
from jfuse.evals.settings import Task
from jfuse.evals.tasks import in_chunks, make_sample, read_task
from jfuse.models.tokenizer import Tokenizer

LABEL = "Passage: "
EXAMPLE = f"""Answer the question based on the given passages.

{LABEL}Amber Bridge
The Amber Bridge crosses the river Lune at Halden. It was opened to traffic in 1907 and rebuilt in stone in 1931. Its \
architect, Ada Holm, also drew the town hall.

Question: Who designed the bridge that crosses the Lune at Halden?
Answer: Ada Holm"""
"""One worked example, made up, so that it answers no question of any data set. Small models hardly use passages
without one, and use them better where passages, question and answer stand exactly as in it: with the answer's cue on
the question's line full prefill of the default model gives 6 HotpotQA answers 2.4 nats a token, as here 2.1."""


def draw(task: Task, tokenizer: Tokenizer, limit: int) -> list[Sample]:
    """The first `limit` samples of a task, laid out as they are asked; fewer if its file has fewer.

    Where the task asks for a worked example, it takes the place of the instruction: by default for questions over
    passages, while prompts of benchmark files stay as they are published.

    Raises:
        ValueError: a file without a row at `task.first`.
    """
    if task.made:
        sizes = {"length": task.length, "num_chunks": task.num_chunks, "haystack": task.haystack}
        seeds = range(task.first, task.first + limit)
        return [make_sample(task.name, seed, encode=tokenizer.encode, **sizes) for seed in seeds]
    samples = read_task(task.data or task.name, limit=task.first + limit)[task.first :]
    if not samples:
        raise ValueError(f"Task {task.name!r} has no sample {task.first}; lower `first`, or give a longer file.")
    samples = [in_chunks(sample, tokenizer, task.chunk_tokens, longest=task.longest) for sample in samples]
    return [with_example(sample) if _wants_example(task, sample) else sample for sample in samples]


def _wants_example(task: Task, sample: Sample) -> bool:
    return sample.instruction == QA_INSTRUCTION if task.example is None else task.example


def with_example(sample: Sample) -> Sample:
    """The sample behind the worked example and laid out like it: passages labelled, the answer's cue on a line."""
    moved = len(LABEL)
    spans = tuple(Span(span.chunk, span.start + moved, span.end + moved) for span in sample.spans)
    chunks = tuple(LABEL + chunk for chunk in sample.chunks)
    joints = sample.joints._replace(cue="\n")
    return dataclasses.replace(sample, example=EXAMPLE, instruction="", chunks=chunks, spans=spans, joints=joints)


def identity(task: Task) -> dict[str, Any]:
    """Everything that decides the task's samples and prompts, as plain values; a file by its checksum."""
    fields = dataclasses.asdict(task)
    for name, path in (("haystack", task.haystack), ("data", task.path)):
        if path is not None and Path(path).is_file():
            fields |= {name: Path(path).name, f"{name}_sha256": _sha256(Path(path).read_bytes())}
    return fields


def checksum(sample: Sample) -> str:
    """Of a sample as it is asked, so that a changed generator or layout is found out. Lengths are in model tokens."""
    return _sha256("\n".join((sample.text, *sample.answers)).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
