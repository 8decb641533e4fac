"""The unit of an evaluation: one sample with the methods to be measured on it, alone or in a batch.

In go items of a plan; out come rows, one for each sample and method, with the seconds that each took.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int

from jfuse.anchors import AnchorRule
from jfuse.evals.batch import bucket, measure_batch
from jfuse.evals.data import Sample
from jfuse.evals.measure import Case, Setting
from jfuse.evals.methods import Method
from jfuse.evals.prompts import Prompt
from jfuse.evals.records import Row
from jfuse.evals.scorers import score
from jfuse.evals.settings import Task
from jfuse.models.decoder import Model
from jfuse.models.tokenizer import Tokenizer
from jfuse.report import Compilations

T = TypeVar("T")
Seconds = dict[str, float]


class Item(NamedTuple):
    """One sample of one task, with the methods that are still to be measured on it."""

    task: Task
    number: int  # among the task's samples, from 0
    sample: Sample
    prompt: Prompt
    methods: list[Method]


class Plan(NamedTuple):
    """All that one model will be asked, in order."""

    name: str  # of the model, without the folders it lies in
    model: Model
    anchor_rule: AnchorRule
    items: list[Item]
    too_long: list[str]  # samples that the model cannot serve, left out for every method alike
    identity: dict[str, Any]
    planned: dict[str, int]  # samples that each method is to be measured on, by its key


def measure_item(plan: Plan, item: Item, setting: Setting, *, ttft: bool = False) -> Iterator[tuple[Row, Seconds]]:
    """Rows and seconds of one sample, method by method. What all methods share is charged to the first.

    Compilation stands apart, because it is not paid again: the other seconds are without it.
    """
    case, shared, compiling = _timed(functools.partial(_case, plan, item, setting))
    for method in item.methods:
        measured, own, compiled = _timed(
            functools.partial(case.measure, method, new_tokens=item.task.new_tokens, ttft=ttft)
        )
        row = _row(plan, item, case, method, measured.figures)
        if measured.answer is not None:
            text = _text(plan.model.tokenizer, measured.answer)
            row |= {"answer": text, "score": score(item.sample, text)}
        yield row, _seconds(own, shared, compiling + compiled) | _rounded(measured.seconds)
        shared = compiling = 0.0


def in_batches(items: Iterable[Item], size: int, setting: Setting) -> Iterator[list[Item]]:
    """Items that one program can measure together, at most `size` of them, each batch as soon as it is full."""
    waiting: defaultdict[Any, list[Item]] = defaultdict(list)
    for item in items:
        kind = (bucket(item.prompt, setting), tuple(method.key for method in item.methods))
        waiting[kind].append(item)
        if len(waiting[kind]) == size:
            yield waiting.pop(kind)
    yield from waiting.values()


def measure_together(plan: Plan, items: Sequence[Item], setting: Setting) -> Iterator[tuple[Row, Seconds]]:
    """Rows of a batch, equal to those of its samples alone up to rounding; each is charged its part of the seconds."""
    cases, shared, compiling = _timed(lambda: [_case(plan, item, setting) for item in items])
    n = len(items)
    for method in items[0].methods:
        figures, own, compiled = _timed(functools.partial(_figures, cases, method))
        seconds = _seconds(own / n, shared / n, (compiling + compiled) / n)
        shared = compiling = 0.0
        for item, case, one in zip(items, cases, figures, strict=True):
            yield _row(plan, item, case, method, one), seconds


def _figures(cases: Sequence[Case], method: Method) -> list[dict[str, Any]]:
    """Full prefill is there already, sample by sample; it is what the others are held against."""
    if method.selector is None:
        return [case.measure(method).figures for case in cases]
    return measure_batch(cases, method)


def _case(plan: Plan, item: Item, setting: Setting) -> Case:
    return Case(plan.model, item.prompt, anchor_rule=plan.anchor_rule, setting=setting)


def _row(plan: Plan, item: Item, case: Case, method: Method, figures: dict[str, Any]) -> Row:
    where = {"model": plan.name, "task": item.task.name, "id": item.sample.id, "index": item.number}
    return where | {"method": method.name, "ratio": method.ratio} | case.shape | figures


def _timed(run: Callable[[], T]) -> tuple[T, float, float]:
    """The result, the seconds that it took, and those of compilation, which are not among them."""
    began = time.perf_counter()
    with Compilations() as compiled:
        result = run()
    elapsed = time.perf_counter() - began
    return result, max(0.0, elapsed - compiled.seconds), compiled.seconds


def _seconds(own: float, shared: float, compiling: float) -> Seconds:
    return _rounded({"seconds": own, "shared_seconds": shared, "compile_seconds": compiling})


def _rounded(seconds: Seconds) -> Seconds:
    return {name: round(value, 4) for name, value in seconds.items()}


def _text(tokenizer: Tokenizer, tokens: Int[np.ndarray, " M"]) -> str:
    return tokenizer.decode(tokens.tolist()).strip()
