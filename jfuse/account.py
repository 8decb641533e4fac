"""The account of a served request: what `Report` says, reckoned from what happened."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from jfuse import costs
from jfuse.config import FusionConfig
from jfuse.fuse import Work
from jfuse.models.decoder import Model, Prefill
from jfuse.pallas.choice import fallbacks
from jfuse.report import Report
from jfuse.selectors.base import Selector
from jfuse.timeline import Event, busy
from jfuse.types import ContextCache, Selection


class Served(NamedTuple):
    """The outcome of `pipeline.serve`, up to the first token."""

    first: Float[Array, " V"]
    context: ContextCache
    queried: Prefill
    selection: Selection
    work: Work
    budget: int
    stages: dict[str, float]
    events: tuple[Event, ...]
    lost: dict[int, str]  # chunks that had to be encoded again while serving, with the reason


def make_report(
    model: Model,
    selector: Selector,
    config: FusionConfig,
    served: Served,
    num_query: int,
    *,
    hits: int = 0,
    missed: Mapping[int, str] | None = None,
    skipped: tuple[int, ...] = (),
    compilations: int = 0,
    decode: float = 0.0,
) -> Report:
    """The account of a served request."""
    context, view = served.context, selector.view
    sizes, itemsize = context.sizes(num_query), np.dtype(model.dtype).itemsize
    fusion = costs.fusion_cost(model.config, context, served.selection)
    begun = costs.begun_cost(model.config, context, served.selection, served.work.begun)
    query = costs.prefill_cost(model.config, num_query, past=context.end)
    probed = costs.probe_cost(model.config, view, sizes)
    full = costs.prefill_cost(model.config, context.end + num_query).flops
    computing = busy(event for event in served.events if event.what in ("fuse", "query"))
    return Report(
        selector=selector.name,
        ratio=selector.ratio if config.ratio is None else config.ratio,
        realised_ratio=costs.realised_ratio(np.asarray(served.selection.recompute), sizes.context),
        budget=served.budget,
        num_prefix=sizes.prefix,
        num_context=sizes.context,
        num_query=num_query,
        rows=served.work.rows,
        edges=fusion.edges,
        flops=fusion.flops - begun.flops + query.flops + probed.flops,
        full_flops=full,
        hits=hits,
        missed=dict(missed or {}),
        skipped=skipped,
        selection_bytes=costs.selection_bytes(model.config, view, sizes, itemsize=itemsize),
        total_bytes=sizes.context * model.config.kv_bytes_per_token(itemsize),
        stages=served.stages | {"decode": decode},
        ttft=sum(served.stages.values()),
        compilations=compilations,
        fallbacks=fallbacks(),
        events=served.events,
        full_prefill_estimate=computing * full / (fusion.flops - begun.flops + query.flops),
    )
