"""One question by many methods: what they share is computed once, and each is held against full prefill.

In come a model, a prompt and methods; out comes one dictionary of plain numbers per method. Chunks are encoded once a
sample, full prefill runs once, and methods with one view share the probe.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.anchors import NUM_SINKS, AnchorRule, chunk_anchors
from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig, View
from jfuse.costs import realised_ratio
from jfuse.evals.fidelity import answer_logits, answer_nll, kl_divergence
from jfuse.evals.methods import Method
from jfuse.evals.prompts import Prompt
from jfuse.evals.recall import recall_at
from jfuse.fuse import fuse, fusion_work
from jfuse.generate import generate
from jfuse.models.decoder import Model
from jfuse.pipeline import ResidentChunks, encode_prefix, full_prefill, serve
from jfuse.probe import chunk_offsets, probe
from jfuse.report import Compilations
from jfuse.selectors.base import Selector, budget_for, no_score, select
from jfuse.stitch import make_layout, prefix_tokens, stitch, stitch_anchors
from jfuse.types import AnchorCache, ContextCache, Evidence, Selection

RECALL_SHARE = 0.1
"""Recall is that of the best tenth of the context (QCFuse eq. 13)."""

MOST_WARM_UPS = 3


class Setting(NamedTuple):
    """How fusions are padded. Mathematically without effect; equal settings give equal bits."""

    pad_to: int = 512
    row_block: int = 64
    staircase_block: int = 128  # where rows differ by layer: coarser, for every pair of sizes is compiled


DEFAULT = Setting()


class Measured(NamedTuple):
    """What one method gives for one sample."""

    figures: dict[str, Any]
    answer: Int[np.ndarray, " _"] | None  # greedy tokens, if asked for
    seconds: dict[str, float]  # to the first token and per stage, if asked for


class Case:
    """One sample ready for its methods: stitched caches, full prefill, and the probes made so far, by view."""

    def __init__(
        self, model: Model, prompt: Prompt, *, anchor_rule: AnchorRule | None = None, setting: Setting = DEFAULT
    ):
        self.model, self.prompt, self.setting = model, prompt, setting
        self._prefix = encode_prefix(model, prompt.prefix) if len(prompt.prefix) else None
        self._chunks = [encode_chunk(model, tokens, anchor_rule=anchor_rule) for tokens in prompt.chunks]
        self.stale = stitch(self._chunks, model.config.rope, prefix=self._prefix, pad_to=setting.pad_to)
        self._layout = make_layout(prompt.chunks, prefix_tokens(self._prefix), pad_to=setting.pad_to)
        self._evidence: dict[View, Evidence] = {}
        self._anchors: dict[tuple[str, float], AnchorCache] = {}
        self._recalls: dict[Selector, float | None] = {}

    @functools.cached_property
    def full(self) -> ContextCache:
        """The cache that full prefill gives; studies of attention alone never need it."""
        return full_prefill(self.model, self._layout, self.prompt.question).context

    @functools.cached_property
    def full_logits(self) -> Float[Array, "M V"]:
        """Full prefill's logits of the reference answer."""
        return self._answer(self.full)

    @property
    def shape(self) -> dict[str, int]:
        """Token counts of the sample's parts."""
        sizes = self.stale.sizes(len(self.prompt.question.tokens))
        counts = {"prefix": sizes.prefix, "context": sizes.context, "query": sizes.query}
        return counts | {"reference": len(self.prompt.reference)}

    def measure(self, method: Method, *, new_tokens: int = 0, ttft: bool = False) -> Measured:
        """The method's figures; None where one does not apply.

        Args:
            new_tokens: also answer greedily, with at most so many tokens.
            ttft: also serve the request, chunks in device memory, and time it once nothing is compiled any more.
        """
        selector, seconds = method.selector, {}
        if selector is None:
            fused, logits = self.full, self.full_logits
            figures = {"realised": 1.0, "rows": None, "visible": 1.0, "sinks": None, "recall": None}
        else:
            selection = self.choose(method)
            fused = self.fuse(selection)
            logits = self._answer(fused)
            figures = self.spent(selection) | {"recall": self.recall(selector)}
        if ttft:
            seconds = self._time(method)
        answer = None
        if new_tokens:
            answer = generate(self.model, fused, self.prompt.question.tokens, max_new_tokens=new_tokens)
        return Measured(self._scored(logits) | figures, answer, seconds)

    def spent(self, selection: Selection) -> dict[str, Any]:
        """What a selection costs, and how much of it goes to the first tokens of chunks, which draw attention anyway.

        States recomputed, rows per layer, share of the context that rows may see; `sinks` is the share of the
        recomputed states that stand among the first `NUM_SINKS` of their chunk, None where nothing is recomputed.
        """
        segments = np.asarray(self.stale.segments)
        recompute, context = np.asarray(selection.recompute), segments >= 0
        total, sinks = recompute.sum(), recompute[:, context & (chunk_offsets(segments) < NUM_SINKS)].sum()
        return {
            "realised": round(realised_ratio(recompute, int(context.sum())), 6),
            "rows": recompute.sum(1).tolist(),
            "visible": round(float(np.asarray(selection.visible)[:, context].mean()), 6),
            "sinks": round(float(sinks / total), 6) if total else None,
        }

    def choose(self, method: Method) -> Selection:
        """What the method recomputes."""
        assert method.selector is not None
        k = budget_for(method.selector, method.ratio, self.stale.sizes(len(self.prompt.question.tokens)))
        return select(
            method.selector,
            self.evidence(method.selector.view),
            k,
            num_layers=self.model.config.num_layers,
        )

    def fuse(self, selection: Selection) -> ContextCache:
        """The fused cache of a selection."""
        work = fusion_work(selection, jnp.asarray(self.stale.segments))
        row_block = self.setting.row_block if len(set(work.rows)) == 1 else self.setting.staircase_block
        return fuse(self.model, self.stale, selection, work=work, row_block=row_block)

    def evidence(self, view: View) -> Evidence:
        """The probe of a view, made once."""
        if view not in self._evidence:
            question = self.prompt.question
            self._evidence[view] = probe(
                self.model, question.tokens, self._anchors_of(view), self.stale, view, scoring=question.scoring
            )
        return self._evidence[view]

    def _anchors_of(self, view: View) -> AnchorCache | None:
        if view.tokens not in ("prefix", "anchors"):
            return None
        key = (view.tokens, view.anchor_ratio)
        if key not in self._anchors:
            blocks = [chunk_anchors(chunk, view.anchor_ratio) for chunk in self._chunks]
            self._anchors[key] = stitch_anchors(
                blocks if view.tokens == "anchors" else [],
                self.model.config.rope,
                self._layout,
                prefix=self._prefix,
                ratio=view.anchor_ratio,
                pad_to=self.setting.pad_to,
                layers=range(self.model.config.num_layers),
            )
        return self._anchors[key]

    def _time(self, method: Method) -> dict[str, float]:
        """Seconds to the first token, caches in device memory, and of each stage; runs that compile are discarded."""
        config = FusionConfig(method.ratio, pad_to=self.setting.pad_to, row_block=self.setting.row_block)
        source = ResidentChunks(self._chunks)
        for discarded in range(MOST_WARM_UPS + 1):
            with Compilations() as compiled:
                if method.selector is None:
                    stages = full_prefill(self.model, self._layout, self.prompt.question).stages
                else:
                    question, selector = self.prompt.question, method.selector
                    stages = serve(self.model, source, question, selector, config, prefix=self._prefix).stages
            if discarded and not compiled.count:
                break
        else:
            raise RuntimeError(f"{method.key} still compiles after {MOST_WARM_UPS} runs of one request.")
        return {"ttft": sum(stages.values()), "discarded": discarded, **{f"{name}_s": s for name, s in stages.items()}}

    def recall(self, selector: Selector) -> float | None:
        """Share of the answer's tokens among the best tenth of the context by the selector's score, summed over layers.

        None where the answer is not labelled, or the selector does not rank.
        """
        if not len(self.prompt.evidence) or self.stale.num_tokens < 1 / RECALL_SHARE or selector.score is no_score:
            return None
        if selector not in self._recalls:
            scores = np.asarray(_ranking(selector, self.evidence(selector.view)))
            context = np.asarray(self.stale.segments) >= 0
            self._recalls[selector] = recall_at(scores[context], self.prompt.evidence, RECALL_SHARE)
        return self._recalls[selector]

    def _answer(self, context: ContextCache) -> Float[Array, "M V"]:
        return answer_logits(self.model, context, self.prompt.question.tokens, self.prompt.reference)

    def _scored(self, logits: Float[Array, "M V"]) -> dict[str, float]:
        kl, nll, top = jax.device_get(_figures(self.full_logits, logits, jnp.asarray(self.prompt.reference)))
        return {"kl": float(kl.mean()), "first_kl": float(kl[0]), "nll": float(nll), "top1": float(top)}


@functools.partial(jax.jit, static_argnames="selector")
def _ranking(selector: Selector, evidence: Evidence) -> Float[Array, " S"]:
    return selector.score(evidence, None).astype(jnp.float32).sum(0)


@jax.jit
def _figures(
    full: Float[Array, "M V"], other: Float[Array, "M V"], reference: Int[Array, " M"]
) -> tuple[Float[Array, " M"], Float[Array, ""], Float[Array, ""]]:
    """KL at every answer position, NLL of the reference, and the share of its tokens that rank first."""
    return kl_divergence(full, other), answer_nll(other, reference), (other.argmax(-1) == reference).mean()
