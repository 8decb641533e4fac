"""Reads and writes the files of a tokenizer: a Hugging Face folder in, a `Tokenizer` out, and back.

No file is executed: chat templates stay text here, and `tokenizer.model`, Python files and pickles are never opened.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jfuse.models.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder.

    Requests start with BOS where the post-processor of `tokenizer.json` adds one (transformers 5, too, ignores
    `add_bos_token` then). Stop ids are the `eos_token_id` list of `generation_config.json` (of `config.json` where
    that is absent) and the tokenizer's EOS. The chat template is `chat_template.jinja`, else the one in
    `tokenizer_config.json`.

    Raises:
        ValueError: no `tokenizer.json`, or a damaged file; the file is named.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} holds no tokenizer.json. Write one with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    spec = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json", optional=True)
    roles = _read_json(folder / "special_tokens_map.json", optional=True) | config
    special_tokens = {role: _spelling(roles[role], folder) for role in _ROLES if roles.get(role)}
    try:
        spec["added_tokens"] = _with_added(spec.get("added_tokens") or [], config.get("added_tokens_decoder") or {})
        return Tokenizer(
            spec,
            special_tokens=special_tokens,
            add_bos=_adds_bos(spec, special_tokens.get("bos_token")),
            stop_ids=_stop_ids(folder),
            chat_template=_chat_template(folder, config),
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"The tokenizer in {folder} cannot be read: {error}") from error


def write_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Writes files from which `read_tokenizer` makes an equal tokenizer: same identity, template, BOS and stop ids."""
    for name, text in tokenizer.files.items():
        (Path(folder) / name).write_text(text, encoding="utf-8")


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must be a JSON object.")
    return content


def _spelling(token: Any, folder: Path) -> str:
    spelling = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(spelling, str):
        raise ValueError(f"The tokenizer in {folder} names the special token {token!r}; it must be text.")
    return spelling


def _with_added(added: list[dict[str, Any]], listed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`tokenizer_config.json` may list added tokens that an older `tokenizer.json` lacks."""
    known = {token["id"] for token in added}
    return added + [{"id": int(token_id), **token} for token_id, token in listed.items() if int(token_id) not in known]


def _adds_bos(spec: Mapping[str, Any], bos_token: str | None) -> bool:
    """Whether the post-processor puts BOS first, found by letting it work on an empty text."""
    if bos_token is None or not spec.get("post_processor"):
        return False
    empty_model = {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}
    try:
        tokenizer = tokenizers.Tokenizer.from_str(
            json.dumps({"model": empty_model, "post_processor": spec["post_processor"]})
        )
    except Exception as error:  # the parser raises bare Exceptions
        raise ValueError(f"The post-processor in tokenizer.json is damaged: {error}.") from error
    return tokenizer.encode("", add_special_tokens=True).tokens[:1] == [bos_token]


def _stop_ids(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name, optional=True).get("eos_token_id")
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    return []


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template is a {type(template).__name__}; it must be text or a list of named templates.")
    return template
