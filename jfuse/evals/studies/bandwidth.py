"""Time to first token while caches arrive over links of different speed (QCFuse section 4.4, Fig. 13)."""

from collections.abc import Mapping, Sequence

from jfuse.evals.studies.breakdown import FULL, time_breakdown
from jfuse.evals.studies.parts import Row
from jfuse.evals.studies.served import Request
from jfuse.selectors.base import Selector
from jfuse.throttle import Throttle

LOAD_SHARES = (0.02, 0.09, 0.29)
"""Time to load all caches over the time of a full prefill. QCFuse's 10 and 3 GB/s are 0.09 and 0.29; unlike a
bandwidth, this carries across machines."""


def bandwidth(
    request: Request,
    methods: Mapping[str, Selector],
    *,
    load_shares: Sequence[float] = LOAD_SHARES,
    ratio: float = 0.5,
    repeats: int = 3,
) -> list[Row]:
    """Stage times of every method behind links that load all caches in the given shares of a full prefill.

    Returns:
        Rows of `time_breakdown` with `load_share` and `gb_per_s`; load share 0 is caches in memory.

    Raises:
        ValueError: a share that is not positive.
    """
    rows = _at(request, methods, ratio, repeats, 0.0, None)
    alone = next(row["ttft"] for row in rows if row["method"] == FULL)
    for share in load_shares:
        link = Throttle.by_load_time(share, full_prefill=alone, num_bytes=request.num_bytes)
        rows += _at(request, methods, ratio, repeats, share, link)
    return rows


def _at(
    request: Request,
    methods: Mapping[str, Selector],
    ratio: float,
    repeats: int,
    share: float,
    link: Throttle | None,
) -> list[Row]:
    source = None if link is None else lambda: link(request.resident)
    rows = time_breakdown(request, methods, ratio=ratio, source=source, repeats=repeats, new_tokens=1)
    speed = None if link is None else link.bytes_per_second / 1e9
    return [{**row, "load_share": share, "gb_per_s": speed} for row in rows]
