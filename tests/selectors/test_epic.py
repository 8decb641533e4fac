"""EPIC: the first tokens of each chunk, by count and by ratio."""

import jax
import numpy as np
import pytest

from jfuse import selectors
from jfuse.fuse import cache_error, fuse
from jfuse.probe import chunk_offsets
from jfuse.selectors.base import budget_for
from jfuse.selectors.epic import start_of_chunk
from jfuse.types import Evidence, Sizes
from tests import tiny
from tests.selectors import plain

LENGTHS = (21, 1, 34, 13)


def firsts(count_of, lengths=LENGTHS, skip=0):
    """Context indices of the first count_of(length) tokens of each chunk after the first `skip` chunks."""
    starts = np.cumsum([0, *lengths])
    return {int(start) + i for n, start in list(zip(lengths, starts, strict=False))[skip:] for i in range(count_of(n))}


@pytest.mark.parametrize("prefix", [0, 9])
@pytest.mark.parametrize("exempt_first", [True, False])
def test_first_k_tokens(choose, prefix, exempt_first):
    """Pitfall 36: k is clipped to the chunk, never spills over; chunk 0 is exempt only where it is exact."""
    request = tiny.build_request(prefix=prefix)
    for k in (0, 2, 16, 64):
        selection = choose(request, selectors.epic(k, exempt_first=exempt_first), 0.3)
        expected = firsts(lambda n, k=k: min(k, n), skip=int(exempt_first and not prefix))
        assert all(plain.picked(request, row) == expected for row in selection.recompute)
        assert np.asarray(selection.visible).all()


@pytest.mark.parametrize("ratio", [0, 0.05, 0.1, 0.29, 1 / 3, 0.5, 0.9, 1])
@pytest.mark.parametrize("prefix", [0, 9])
def test_a_share_of_each_chunk(choose, ratio, prefix):
    """Matched ratio: floor(ratio * length) of every chunk, exactly, by one ranking."""
    request = tiny.build_request(prefix=prefix)
    shares = {0: 0, 0.05: 0.05, 0.1: 0.1, 0.29: 0.29, 1 / 3: None, 0.5: 0.5, 0.9: 0.9, 1: 1}
    count = (lambda n: n // 3) if shares[ratio] is None else (lambda n: int(round(ratio * n * 1e6)) // 10**6)
    for exempt_first in (True, False):
        selector = selectors.epic(exempt_first=exempt_first)
        expected = firsts(count, skip=int(exempt_first and not prefix))
        assert budget_for(selector, ratio, request.context.sizes()) == len(expected)
        assert plain.picked(request, choose(request, selector, ratio).recompute[0]) == expected


@pytest.mark.parametrize("lengths", [(512, 511, 510, 509), (1000, 999, 7), (3, 3, 3)])
def test_shares_are_exact_for_long_chunks(lengths):
    """The float ranking separates k/n of long chunks: every ratio gives floor(ratio * length) in each chunk."""
    segments = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    nothing = np.zeros(len(segments), np.int32)
    evidence = Evidence((), (), (), None, np.ones(1, bool), nothing[:1], nothing, segments, chunk_offsets(segments))
    score = np.asarray(jax.jit(start_of_chunk(False))(evidence))[0]
    for percent in range(0, 101, 7):
        counts = [percent * n // 100 for n in lengths]
        top = np.argsort(-score, kind="stable")[: sum(counts)]
        assert set(top) == firsts(dict(zip(lengths, counts, strict=True)).get, lengths)


def test_whole_chunks_are_full_prefill(choose):
    """Equality between methods, pitfall 1: k >= chunk length gives full prefill, chunk 0 exempt or not."""
    for prefix in (0, 9):
        request = tiny.build_request(prefix=prefix)
        full = request.full()
        for selector in (selectors.epic(34), selectors.epic(64, exempt_first=False)):
            fused = fuse(request.model, request.context, choose(request, selector, None), row_block=96)
            assert np.asarray(cache_error(fused, full)).max() < 1e-5


def test_nothing_is_loaded_or_probed(evidence):
    """EPIC's view is empty: no layer of any cache is read."""
    request = tiny.build_request()
    seen = evidence(request._replace(context=request.context._replace(kv={})), selectors.epic())
    assert (seen.queries, seen.pic, seen.query, seen.fresh) == ((), (), (), ())


def test_budget_ignores_the_ratio_of_a_count():
    """LegoLink-k has no ratio; the request still reports what is recomputed."""
    sizes = Sizes(9, LENGTHS)
    assert {budget_for(selectors.epic(16), ratio, sizes) for ratio in (0, 0.5, 1, None)} == {16 + 1 + 16 + 13}
    with pytest.raises(ValueError, match="k is -1"):
        selectors.epic(-1)
