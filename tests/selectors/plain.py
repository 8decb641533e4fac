"""Slow, plain renderings of what selectors compute: float64 NumPy, loops over heads and rows, Python sets.

Nothing here uses the library; the weights and the request come from `tests.tiny`, the decoder from `tests.reference`.
"""

import numpy as np


def cached(request):
    """Keys (rotated) and values [L, T, K, H] before the query: the prefix exact, every chunk as it was alone."""
    reference, s = request.reference, request.num_prefix
    k, v = reference.stitch([np.asarray(chunk.tokens) for chunk in request.chunks], s)
    if s:
        alone = reference.run(request.ids[:s])
        k, v = np.concatenate([alone.k, k], 1), np.concatenate([alone.v, v], 1)
    return k, v


def prefix_fresh(request):
    """Keys and values [L, T, K, H] of prefix and context as full prefill has them."""
    full = request.reference.run(request.ids[: request.end])
    return full.k, full.v


def softmax_attention(q, k, v):
    """One query over the given keys and values."""
    scores = np.array([q @ key for key in k]) / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ v


def query_states(request, visible):
    """The query run over cached entries: queries and own keys per layer, [L, U, N, H] and [L, U, K, H].

    Args:
        visible: for each layer, the cached positions that the query attends to.
    """
    reference, c = request.reference, request.model.config
    cached_k, cached_v = cached(request)
    at = request.end + np.arange(len(request.query))
    x = reference.params["embed"]["table"][request.query]
    queries, keys = [], []
    for l in range(c.num_layers):
        q, k, v = reference.project(l, x)
        q, k = reference.rotate(q, at), reference.rotate(k, at)
        queries.append(q)
        keys.append(k)
        seen = sorted(visible[l])
        out = np.zeros_like(q)
        for t in range(len(at)):
            for h in range(c.num_heads):
                g = h // (c.num_heads // c.num_kv_heads)
                all_k = np.concatenate([cached_k[l][seen, g], k[: t + 1, g]])
                all_v = np.concatenate([cached_v[l][seen, g], v[: t + 1, g]])
                out[t, h] = softmax_attention(q[t, h], all_k, all_v)
        x = reference.finish(l, x, out)
    return np.stack(queries), np.stack(keys)


def head_mass(request, q, own, keys, *, denominator="all", rows=None):
    """Attention [t, h, i] of the scoring rows to prefix and context positions at one layer; zero outside the set."""
    c, s, rows = request.model.config, request.num_prefix, range(len(q)) if rows is None else rows
    mass = np.zeros((len(rows), c.num_heads, len(keys)))
    for a, t in enumerate(rows):
        for h in range(c.num_heads):
            g = h // (c.num_heads // c.num_kv_heads)
            z = np.array([q[t, h] @ key for key in keys[:, g]]) / np.sqrt(c.head_size)
            others = [q[t, h] @ key / np.sqrt(c.head_size) for key in own[: t + 1, g]]
            weight = np.exp(z)
            if denominator == "context":
                weight[:s] = 0
            total = weight.sum() + (np.exp(others).sum() if denominator == "all" else 0.0)
            mass[a, h] = weight / total
    return mass


def question_attention(request, visible, *, denominator="all", rows=None):
    """Mean attention [L, N] of heads and scoring rows to each context position, the query run over what is visible."""
    q, own = query_states(request, visible)
    keys, _ = cached(request)
    mass = [head_mass(request, q[l], own[l], keys[l], denominator=denominator, rows=rows) for l in range(len(q))]
    return np.stack([m.mean((0, 1)) for m in mass])[:, request.num_prefix :]


def everything_before(request):
    return [set(range(request.end))] * request.model.config.num_layers


def prefix_only(request):
    return [set(range(request.num_prefix))] * request.model.config.num_layers


def on_context(request, scores):
    """A library score cut to the context positions, float64."""
    return np.asarray(scores, np.float64)[..., request.num_prefix : request.end]


def best(scores, k):
    """The k best indices: score descending, then index ascending."""
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


def recall(scores, evidence):
    """Share of the labelled context positions among the floor(N / 10) best."""
    return len(best(scores, len(scores) // 10) & {int(i) for i in evidence}) / len(evidence)


def picked(request, mask):
    """Context indices of one row of a selection."""
    return {int(i) for i in np.flatnonzero(np.asarray(mask)[request.num_prefix : request.end])}


def min_max(scores):
    low, high = min(scores), max(scores)
    return [(a - low) / (high - low) if high > low else 0.0 for a in scores]


def nearest(layers, l):
    """The view layer nearest to l, of two the shallower."""
    return min(sorted(layers), key=lambda view: abs(view - l))


def staircase(sets):
    """R_l, the union of S_l and all deeper ones."""
    return [set().union(*sets[l:]) for l in range(len(sets))]
