"""`selective_attention` (XLA) against torch's scaled_dot_product_attention, float32, both bound to the same one core.

4,096 positions with the heads of SmolLM2-135M (9 query, 3 KV, size 64). Gathered rows are compared with sdpa under the
explicit mask, all rows with its causal form, both with `enable_gqa=True`; and rows with a restricted context (35 % of
the keys and a window of 32) with the same rows over the full prefix. Usage: python benchmarks/kernels.py [--repeats 9]
"""

import argparse
from collections.abc import Callable
from typing import Any

import setting

setting.pin(1)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

from jfuse.evals.latency import interleave, summary  # noqa: E402
from jfuse.pallas import selective_attention  # noqa: E402

KEYS, HEADS, KV_HEADS, SIZE = 4096, 9, 3, 64
SHARES = (0.1, 0.3, 0.5)
VISIBLE, WINDOW = 0.35, 32
GATHERED, CAUSAL, RESTRICTED = 1.5, 0.95, 1.6
"""What is wanted: over sdpa with a mask, over causal sdpa, and over the same rows with the full prefix."""


def main() -> None:
    """Runs all comparisons in turn and prints times, ratios and whether they are what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--keys", type=int, default=KEYS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, keys = np.random.default_rng(0), arguments.keys
    q, k, v = (rng.standard_normal((keys, heads, SIZE), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    visible = rng.random(keys) < VISIBLE
    variants: dict[str, Callable[[], object]] = {}
    last: dict[str, np.ndarray] = {}

    def ours(name: str, at: np.ndarray, **restricted: Any) -> None:
        run = jax.jit(lambda q, k, v, at: selective_attention(q, k, v, at, implementation="xla", **restricted))
        inputs = jax.device_put((q[at], k, v, at))

        def call() -> None:
            last[name] = np.asarray(run(*inputs))

        variants[name] = call

    def theirs(name: str, at: np.ndarray, **how: Any) -> None:
        tq, tk, tv = (torch.from_numpy(a).transpose(0, 1)[None].contiguous() for a in (q[at], k, v))

        def call() -> None:
            with torch.inference_mode():
                last[name] = sdpa(tq, tk, tv, enable_gqa=True, **how)[0].transpose(0, 1).numpy()

        variants[name] = call

    every = np.arange(keys, dtype=np.int32)
    ours("all rows", every)
    theirs("all rows, sdpa", every, is_causal=True)
    for share in SHARES:
        at = np.sort(rng.choice(keys, int(share * keys), replace=False)).astype(np.int32)
        ours(f"{share:.0%} rows", at)
        theirs(f"{share:.0%} rows, sdpa", at, attn_mask=torch.from_numpy(every[None] <= at[:, None]))
        ours(f"{share:.0%} rows, restricted", at, visible=visible, window=WINDOW)
    seconds = {name: summary(times) for name, times in interleave(variants, repeats=arguments.repeats).items()}

    def ratio(slow: str, fast: str) -> float:
        return seconds[slow]["median"] / seconds[fast]["median"]

    checks = [
        setting.check(
            f"all rows over causal sdpa: at least {CAUSAL}",
            value := ratio("all rows, sdpa", "all rows"),
            value >= CAUSAL,
        )
    ]
    for share in SHARES:
        name = f"{share:.0%} rows"
        value = ratio(f"{name}, sdpa", name)
        checks.append(setting.check(f"{name} over sdpa with a mask: at least {GATHERED}", value, value >= GATHERED))
        value = ratio(name, f"{name}, restricted")
        checks.append(
            setting.check(f"{name}, restricted over full prefix: at least {RESTRICTED}", value, value >= RESTRICTED)
        )
    differences = {
        name: float(np.abs(last[name] - last[f"{name}, sdpa"]).max()) for name in last if f"{name}, sdpa" in last
    }
    for name, spread in seconds.items():
        low, middle, high = (1e3 * spread[key] for key in ("q25", "median", "q75"))
        print(f"{name:22s} {middle:8.1f} ms (quartiles {low:.1f} to {high:.1f})")
    for check in checks:
        print(f"{'met    ' if check['met'] else 'NOT met'}  {check['value']:.2f}  {check['check']}")
    print(f"largest difference from sdpa: {max(differences.values()):.1e}")
    settings = {"keys": keys, "heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "torch": torch.__version__}
    result = {"settings": settings, "seconds": seconds, "checks": checks, "differences": differences}
    print(setting.save("kernels", result))


if __name__ == "__main__":
    main()
