"""RoPE tables from the settings of a Hugging Face config.json, in its old and its new spelling.

In: the config as a dict. Out: a `Rope`, or a `LongRope` with both of its sets. Frequencies are computed in float64 and
rounded once, by `jfuse.models.rope.angles`.
"""

import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np

from jfuse.models.rope import LongRope, Rope, default_rope

Settings = dict[str, Any]
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
SCALED_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
PER_LAYER_FIELDS = ("rope_local_base_freq", "local_rope_theta", "global_rope_theta", "swa_rope_theta", "no_rope_layers")


def rope_settings(config: Mapping[str, Any], *, aliases: Mapping[str, str] = MappingProxyType({})) -> Settings:
    """One dict of RoPE settings from either spelling, with `rope_type` and `rope_theta` always there.

    The old spelling has `rope_theta` and `rope_scaling` (its type under `rope_type` or the legacy `type`, or null); the
    new one has `rope_parameters`. Fields a rope type does not know are named in one warning.

    Args:
        aliases: further names under which a family's configs give a rope type.

    Raises:
        ValueError: settings per layer type, both spellings at odds, or a rope type that is not implemented.
    """
    settings = _one_spelling(config)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    kind = settings["rope_type"] = aliases.get(kind, kind)
    for key, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", 1.0)):
        if settings.get(key) is None:
            settings[key] = config.get(key) if config.get(key) is not None else default
        _positive(settings, key)
    if kind not in SCALED_KEYS:
        reason = " (its base depends on each request's length, so a cached key fits one length only)"
        raise ValueError(
            f"The rope type is {kind!r}{reason if kind == 'dynamic' else ''}, which is not implemented. "
            f"Implemented: {', '.join(SCALED_KEYS)}."
        )
    if original := config.get("original_max_position_embeddings"):  # outside the dict it has precedence, as in Phi-3
        settings["original_max_position_embeddings"] = original
    unknown = sorted(set(settings) - COMMON_KEYS - SCALED_KEYS[kind] - {"original_max_position_embeddings"})
    if unknown:
        warnings.warn(
            f"RoPE settings that the type {kind!r} does not use are ignored: {', '.join(unknown)}.", stacklevel=2
        )
    return settings


def make_rope(settings: Settings, *, head_size: int, max_positions: int) -> Rope | LongRope:
    """The table of one model.

    Args:
        settings: as `rope_settings` returns them.
        max_positions: the config's max_position_embeddings; stands in for a missing original length.

    Raises:
        ValueError: a setting is missing, not a positive number, or of the wrong length.
    """
    original = settings.get("original_max_position_embeddings")
    if settings["rope_type"] != "longrope":  # which must say where its sets change
        settings = settings | {"original_max_position_embeddings": original or max_positions}
    if settings.get("factor") is None and settings["rope_type"] in ("yarn", "longrope") and _is_positive(original):
        settings = settings | {"factor": max_positions / original}
    share = _positive(settings, "partial_rotary_factor")
    rotary_size = int(head_size * share)
    if share > 1 or rotary_size < 2 or rotary_size % 2:
        raise ValueError(
            f"partial_rotary_factor {share} of head size {head_size} turns {rotary_size} dimensions; RoPE needs an "
            f"even number from 2 to {head_size}."
        )
    base = default_rope(rotary_size, _positive(settings, "rope_theta"))
    kind = settings["rope_type"]
    if kind == "default":
        return base
    if kind == "longrope":
        return _longrope(np.array(base.inv_freq), settings)
    inv_freq, attention_factor = SCALED[kind](np.array(base.inv_freq), settings)
    return Rope(kind, tuple(inv_freq.tolist()), attention_factor)


def _one_spelling(config: Mapping[str, Any]) -> Settings:
    """The RoPE dict of the config, copied; empty where there is none."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    for name, settings in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(settings, Mapping):
            raise ValueError(f"config.json: {name} is {settings!r}; it must be an object or null.")
        if nested := [key for key, value in settings.items() if isinstance(value, Mapping)]:
            raise ValueError(
                f"config.json: {name} has settings per layer type ({', '.join(nested)}); "
                "one RoPE for all layers is implemented."
            )
    if per_layer := [key for key in PER_LAYER_FIELDS if config.get(key)]:
        raise ValueError(
            f"config.json: {', '.join(per_layer)} gives layers different RoPE; one RoPE for all layers is implemented."
        )
    if at_odds := sorted(key for key in old.keys() & new.keys() if old[key] != new[key]):
        raise ValueError(f"config.json: rope_scaling and rope_parameters differ in {', '.join(at_odds)}. Remove one.")
    return {**new, **old}


def _linear(inv_freq: np.ndarray, settings: Settings) -> tuple[np.ndarray, float]:
    """Position interpolation (Chen et al., 2023): all frequencies divided by the factor."""
    return inv_freq / _positive(settings, "factor"), 1.0


def _llama3(inv_freq: np.ndarray, settings: Settings) -> tuple[np.ndarray, float]:
    """Llama 3.1's scaling: long waves divided by the factor, short ones kept, a linear ramp between."""
    factor, low, high, original = (
        _positive(settings, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if high <= low:
        raise ValueError(f"RoPE: high_freq_factor is {high} and low_freq_factor is {low}; the first must be larger.")
    turns = original * inv_freq / (2 * math.pi)  # of each wave within the original length
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (kept + (1 - kept) / factor), 1.0


def _yarn(inv_freq: np.ndarray, settings: Settings) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., 2023, section 3.2): a ramp over dimensions from kept to interpolated, and a magnitude."""
    settings = settings | {key: settings.get(key) or default for key, default in (("beta_fast", 32), ("beta_slow", 1))}
    factor, original, theta, fast, slow = (
        _positive(settings, key)
        for key in ("factor", "original_max_position_embeddings", "rope_theta", "beta_fast", "beta_slow")
    )
    dim = 2 * len(inv_freq)

    def dimension(turns: float) -> float:
        """Dimension whose wave turns this often within the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(fast), dimension(slow)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - first) / (last - first or 0.001), 0.0, 1.0)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, _yarn_attention_factor(settings, factor)


def _yarn_attention_factor(settings: Settings, factor: float) -> float:
    """The explicit factor, else 0.1 ln(factor) + 1 (YaRN, section 3.4), with DeepSeek's mscale pair where given."""
    if settings.get("attention_factor") is not None:
        return _positive(settings, "attention_factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale, scale_all = settings.get("mscale"), settings.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


def _longrope(inv_freq: np.ndarray, settings: Settings) -> LongRope:
    """LongRoPE (Ding et al., 2024): one divisor per dimension, from one of two sets; a common magnitude factor."""
    original = int(_positive(settings, "original_max_position_embeddings"))  # the length at which the sets change
    if settings.get("attention_factor") is not None:
        magnitude = _positive(settings, "attention_factor")
    else:
        factor = _positive(settings, "factor")
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def scaled(key: str) -> Rope:
        divisors = settings.get(key)
        if not isinstance(divisors, list) or len(divisors) != len(inv_freq) or not all(map(_is_positive, divisors)):
            found = f"{len(divisors)} entries" if isinstance(divisors, list) else repr(divisors)
            raise ValueError(f"RoPE: {key} must be a list of {len(inv_freq)} positive numbers; found {found}.")
        return Rope("longrope", tuple((inv_freq / np.array(divisors, np.float64)).tolist()), magnitude)

    return LongRope(scaled("short_factor"), scaled("long_factor"), original)


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


def _positive(settings: Mapping[str, Any], key: str) -> float:
    """A setting that must be a positive number."""
    value = settings.get(key)
    if not _is_positive(value):
        raise ValueError(f"RoPE: {key} is {value!r}; the config must give a positive number.")
    return float(value)


SCALED: dict[str, Callable[[np.ndarray, Settings], tuple[np.ndarray, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
