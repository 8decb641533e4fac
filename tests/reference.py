"""The dense reference of every core test: float64 NumPy, whole score matrices, no code of the library.

A request runs as one pass over all its tokens with a T x T mask; positions that are not recomputed get their stale
keys and values back after the projection of each layer. Slow, and obviously right. Only the layout of the parameter
tree and the numbers of the config are taken from the library.
"""

from typing import NamedTuple

import numpy as np


class Pass(NamedTuple):
    """What one dense pass leaves behind, everything rotated."""

    q: np.ndarray  # [L, T, N, H]
    k: np.ndarray  # [L, T, K, H]
    v: np.ndarray  # [L, T, K, H]
    k_raw: np.ndarray  # [L, T, K, H] before RoPE
    logits: np.ndarray  # [T, V]


class Reference:
    """A decoder in plain NumPy."""

    def __init__(self, config, params):
        self.config = config
        self.params = {
            name: {key: self._wide(leaf) for key, leaf in part.items()} if name != "blocks" else self._wide(part)
            for name, part in params.items()
        }

    def _wide(self, leaf):
        if isinstance(leaf, dict):
            return {key: self._wide(value) for key, value in leaf.items()}
        return (
            np.asarray(leaf, dtype=np.float64)
            if leaf.dtype != "bfloat16"
            else np.asarray(leaf.astype("float32"), float)
        )

    def norm(self, x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * scale

    def rotate(self, x, positions):
        """Rotation of pairs (i, i + F) as complex numbers; dimensions past 2F are left alone."""
        rope = self.config.rope
        half = len(rope.inv_freq)
        turn = np.exp(1j * np.outer(np.asarray(positions, float), np.asarray(rope.inv_freq)))[:, None, :]
        pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn * rope.attention_factor
        return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)

    def linear(self, x, part):
        return x @ part["kernel"] + part.get("bias", 0.0)

    def project(self, l, x):
        """Queries, keys and values of layer l before RoPE."""
        c, block = (
            self.config,
            {name: {k: v[l] for k, v in part.items()} for name, part in self.params["blocks"].items()},
        )
        y = self.linear(self.norm(x, block["attn_norm"]["scale"]), block["qkv"])
        a, b = c.num_heads * c.head_size, (c.num_heads + c.num_kv_heads) * c.head_size
        q = y[:, :a].reshape(len(x), c.num_heads, c.head_size)
        k = y[:, a:b].reshape(len(x), c.num_kv_heads, c.head_size)
        v = y[:, b:].reshape(len(x), c.num_kv_heads, c.head_size)
        if c.qk_norm:
            q, k = self.norm(q, block["q_norm"]["scale"]), self.norm(k, block["k_norm"]["scale"])
        return q, k, v

    def finish(self, l, x, attended):
        block = {name: {k: v[l] for k, v in part.items()} for name, part in self.params["blocks"].items()}
        x = x + self.linear(attended.reshape(len(x), -1), block["o"])
        both = self.linear(self.norm(x, block["mlp_norm"]["scale"]), block["gate_up"])
        gate, up = both[:, : self.config.mlp_width], both[:, self.config.mlp_width :]
        return x + self.linear(gate / (1 + np.exp(-gate)) * up, block["down"])

    def head(self, x):
        x = self.norm(x, self.params["final_norm"]["scale"])
        return x @ (self.params["embed"]["table"].T if self.config.tied else self.params["head"]["kernel"])

    def run(self, tokens, positions=None, *, mask=None, stale=None, fresh=None) -> Pass:
        """One pass over T tokens.

        Args:
            mask: [T, T] or [L, T, T], which keys each row reads (or with what weight); causal by default.
            stale: keys (rotated) and values [L, T, K, H] that stand in wherever `fresh` is false.
            fresh: [L, T], which rows keep their own keys and values, or what share of them.
        """
        c = self.config
        positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
        mask = positions[None, :] <= positions[:, None] if mask is None else mask
        mask = np.broadcast_to(mask, (c.num_layers, len(tokens), len(tokens)))
        x = self.params["embed"]["table"][np.asarray(tokens)]
        kept = []
        for l in range(c.num_layers):
            q, k_raw, v = self.project(l, x)
            q, k = self.rotate(q, positions), self.rotate(k_raw, positions)
            if stale is not None:
                own = np.asarray(fresh[l], float)[:, None, None]
                k, v = own * k + (1 - own) * stale[0][l], own * v + (1 - own) * stale[1][l]
            kept.append((q, k, v, k_raw))
            x = self.finish(l, x, attention(q, k, v, mask[l]))
        return Pass(*(np.stack(part) for part in zip(*kept, strict=True)), self.head(x))

    def anchor_scores(self, tokens, instruction):
        """KVzip's score [L, C]: the largest attention that a row of the instruction pays to each token of a chunk."""
        alone = self.run(np.concatenate([tokens, instruction]))
        at = np.arange(alone.q.shape[1])
        weights = [softmax(scores(q, k), at[None] <= at[:, None]) for q, k in zip(alone.q, alone.k, strict=True)]
        return np.stack([w[:, len(tokens) :, : len(tokens)].max((0, 1)) for w in weights])

    def stitch(self, pieces, start=0):
        """Keys and values [L, N, K, H] of chunks encoded alone and placed one after the other from `start`."""
        keys, values = [], []
        for tokens in pieces:
            alone = self.run(tokens)
            at = np.arange(len(tokens)) + start
            keys.append(np.stack([self.rotate(k, at) for k in alone.k_raw]))
            values.append(alone.v)
            start += len(tokens)
        return np.concatenate(keys, 1), np.concatenate(values, 1)


def softmax(scores, mask):
    """Softmax of the last axis over the keys in the mask (or weighted by it); zeros for rows without any."""
    scores = np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0)) * mask
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def scores(q, k):
    """Scaled products [N, U, S]; query head h reads KV head h // (N / K), written as an explicit repeat."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return np.einsum("unh,snh->nus", q, k) / np.sqrt(q.shape[-1])


def attention(q, k, v, mask):
    """Softmax attention [U, N, H] with an explicit mask [U, S]."""
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    return np.einsum("nus,snh->unh", softmax(scores(q, k), mask), v)


def restricted_mask(positions, segments, visible, window):
    """The mask of a recomputed row: visible keys, the prefix, the window before it and itself, never later ones."""
    positions, away = np.asarray(positions), np.subtract.outer(positions, positions)
    return (away >= 0) & (np.asarray(visible) | (np.asarray(segments) == -2) | (away <= window))
