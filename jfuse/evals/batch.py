"""Many samples at once: one compiled `jit(vmap(...))` selects, fuses and scores a whole bucket.

In go `Case`s of one bucket and a method; out come the figures that `Case.measure` gives for each. For quality alone:
times of a batch say nothing about a request.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import context_bucket, query_bucket, round_up
from jfuse.evals.fidelity import kl_divergence
from jfuse.evals.measure import DEFAULT, Case, Setting
from jfuse.evals.methods import Method
from jfuse.evals.prompts import Prompt
from jfuse.fuse import Work, fuse
from jfuse.generate import padded_query
from jfuse.models.decoder import Model, logits, prefill
from jfuse.selectors.base import Selector, budget_for, check_scores, select_and_count
from jfuse.types import ContextCache, Evidence, Selection

ANSWER_BLOCK = 16
"""Answers are padded to a multiple of so many tokens."""


class Answers(NamedTuple):
    """Question and reference answer of every sample of a batch, padded alike."""

    tokens: Int[np.ndarray, "B T"]  # question and reference but for its last token
    positions: Int[np.ndarray, "B T"]
    first: Int[np.ndarray, " B"]  # row that predicts the first answer token
    reference: Int[np.ndarray, "B M"]
    real: Bool[np.ndarray, "B M"]


def bucket(prompt: Prompt, setting: Setting = DEFAULT) -> tuple[int, int, int]:
    """Samples with one bucket can be batched: equal padded lengths of context, question, and question with answer."""
    length = len(prompt.question.tokens)
    context = context_bucket(len(prompt.prefix), sum(map(len, prompt.chunks)), setting.pad_to)
    return context, query_bucket(length), query_bucket(length + len(prompt.reference) - 1)


def measure_batch(cases: Sequence[Case], method: Method) -> list[dict[str, Any]]:
    """What `Case.measure(method).figures` gives, of each case.

    Raises:
        ValueError: no case, cases of different buckets, models or settings, or full prefill, which is no fusion.
    """
    kinds = {(id(case.model), case.setting, bucket(case.prompt, case.setting)) for case in cases}
    if len(kinds) != 1:
        raise ValueError(f"{len(cases)} cases are no batch; give one or more of one model, setting and bucket.")
    if method.selector is None:
        raise ValueError("full prefill is what the others are measured against; give a method with a selector.")
    model, selector = cases[0].model, method.selector
    evidence = _stacked([case.evidence(selector.view) for case in cases])
    sizes = [case.stale.sizes(len(case.prompt.question.tokens)) for case in cases]
    k = _stacked([jax.tree.map(np.int32, budget_for(selector, method.ratio, size)) for size in sizes])
    selections, broken = _select(selector, model.config.num_layers, evidence, k)
    check_scores(selector, int(broken.sum()))
    answers = _answers(cases)
    full = np.zeros((*answers.reference.shape, model.config.vocab_size), np.float32)
    for index, case in enumerate(cases):
        full[index, : len(case.prompt.reference)] = case.full_logits
    row_block = cases[0].setting.row_block
    work = common_work(selections, row_block)
    context = _stacked([case.stale for case in cases])
    figures = jax.device_get(_run(model, context, selections, answers, full, work, row_block))
    return [
        {name: float(values[row]) for name, values in figures.items()}
        | case.spent(jax.tree.map(lambda leaf, row=row: leaf[row], selections))
        | {"recall": case.recall(selector)}
        for row, case in enumerate(cases)
    ]


def common_work(selections: Selection, row_block: int = 1) -> Work:
    """One static shape that every selection of a batch fits into, in whole blocks, so that batches share programs.

    `fuse` takes layers of equal row counts for one set. Where a set shrinks in some sample but its blocks do not, the
    layer before gets a block more, so that the rows are looked at again.
    """
    recompute = np.asarray(selections.recompute)  # [B, L, S]
    rows = [round_up(int(recompute[:, -1].sum(-1).max()), row_block)]
    for l in range(recompute.shape[1] - 2, -1, -1):
        shrinks = bool((recompute[:, l] != recompute[:, l + 1]).any())
        most = max(round_up(int(recompute[:, l].sum(-1).max()), row_block), rows[0])
        rows.insert(0, most + row_block if shrinks and most == rows[0] else most)
    return Work(tuple(rows), restricted=not bool(np.asarray(selections.visible).all()))


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _select(selector: Selector, num_layers: int, evidence: Evidence, k: Any) -> tuple[Selection, Int[Array, " B"]]:
    return jax.vmap(lambda evidence, k: select_and_count(selector, evidence, k, num_layers=num_layers))(evidence, k)


def _answers(cases: Sequence[Case]) -> Answers:
    rows = []
    longest = round_up(max(len(case.prompt.reference) for case in cases), ANSWER_BLOCK)
    for case in cases:
        question, reference = case.prompt.question.tokens, case.prompt.reference
        tokens, positions = padded_query(np.concatenate([question, reference[:-1]]), case.stale.end)
        padding = longest - len(reference)
        real = np.arange(longest) < len(reference)
        rows.append((tokens, positions, np.int32(len(question) - 1), np.pad(reference, (0, padding)), real))
    return Answers(*(np.stack(column) for column in zip(*rows, strict=True)))


@functools.partial(jax.jit, static_argnames=("work", "row_block"))
def _run(
    model: Model,
    context: ContextCache,
    selections: Selection,
    answers: Answers,
    full: Float[Array, "B M V"],
    work: Work,
    row_block: int,
) -> dict[str, Float[Array, " B"]]:
    def one(context: ContextCache, selection: Selection, answer: Any, full: Float[Array, "M V"]):
        fused = fuse(model, context, selection, work=work, row_block=row_block)
        hidden = prefill(model, answer.tokens, answer.positions, fused).hidden
        rows = jnp.take(hidden, answer.first + jnp.arange(full.shape[0]), axis=0, mode="clip")
        scores = logits(model.config, model.params, rows)
        kl = kl_divergence(full, scores)
        log_probability = jax.nn.log_softmax(scores)
        nll = -jnp.take_along_axis(log_probability, answer.reference[:, None], axis=-1)[:, 0]
        top = (scores.argmax(-1) == answer.reference).astype(jnp.float32)
        real = answer.real

        def mean(values):
            return jnp.where(real, values, 0.0).sum() / real.sum().astype(jnp.float32)

        return {"kl": mean(kl), "first_kl": kl[0], "nll": mean(nll), "top1": mean(top)}

    return jax.vmap(one)(context, selections, answers, full)
