"""The content of a `tokenizer.json` as data: checked, built, and stripped of its control tokens."""

from collections.abc import Mapping
from typing import Any

import tokenizers

_MODEL_KINDS = ("BPE", "WordLevel")


def checked_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a `tokenizer.json`, after checking the parts that jfuse reads itself.

    Raises:
        ValueError: another kind of model, or a damaged vocabulary or added token.
    """
    added, model = spec.get("added_tokens") or [], spec.get("model")
    if not isinstance(model, Mapping) or model.get("type") not in _MODEL_KINDS:
        kind = model.get("type") if isinstance(model, Mapping) else model
        raise ValueError(f"The tokenizer's model is {kind!r}; jfuse supports {', '.join(_MODEL_KINDS)}.")
    fields = {"id": int, "content": str, "special": bool}
    for token in added:
        if not isinstance(token, Mapping) or any(type(token.get(key)) is not kind for key, kind in fields.items()):
            raise ValueError(f"The tokenizer's added token {token!r} is damaged; it needs {', '.join(fields)}.")
    if not isinstance(model.get("vocab"), Mapping):
        raise ValueError("The tokenizer's model has no vocabulary (an object from token to id).")
    return {**spec, "added_tokens": list(added)}


def build(content: str) -> tokenizers.Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        ValueError: content that contradicts itself.
    """
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the parser raises bare Exceptions
        raise ValueError(f"The tokenizer's content is damaged: {error}.") from error


def without_control(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer without its control tokens: neither matched in text nor reachable by merges.

    Every added token counts as control, special or not (`<think>`, `<tool_call>`), unless it is white space.
    """
    control = {token["content"] for token in spec["added_tokens"] if token["content"].strip()}
    model = dict(spec["model"])
    if not control.isdisjoint(model["vocab"]):
        dropped = control - {model.get("unk_token")}  # which stands for unknown characters, and is not spelled by them
        model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token not in dropped}
        if "merges" in model:
            pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [pair for pair in pairs if control.isdisjoint((*pair, "".join(pair)))]
    kept = [token for token in spec["added_tokens"] if token["content"] not in control]
    return {**spec, "model": model, "added_tokens": kept}
