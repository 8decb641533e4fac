"""Loads a model folder in Hugging Face layout: config.json, safetensors weights, tokenizer. Runs nothing in it."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jfuse.models.assemble import TensorSource, assemble
from jfuse.models.config import ModelConfig
from jfuse.models.decoder import Model
from jfuse.models.families import FAMILIES, config_from_hf
from jfuse.models.params import Params
from jfuse.models.shards import open_shards
from jfuse.models.tokenizer_files import read_tokenizer

DTYPES = ("auto", "float32", "bfloat16")


def load_hf(folder: str | Path, *, dtype: str = "auto", longest_request: int | None = None) -> Model:
    """The model in a folder with config.json, safetensors files and, where there is a tokenizer.json, its tokenizer.

    Args:
        dtype: of the parameters, hence of keys and values; "auto" is float32 on a CPU and bfloat16 on an accelerator.
        longest_request: positions of the longest request to be served, which chooses a longrope model's factor set.

    Raises:
        ValueError: config, weights or tokenizer are missing, malformed, do not fit each other, or are not supported.
    """
    config, params, weights_id = load_weights(folder, dtype=dtype, longest_request=longest_request)
    tokenizer = read_tokenizer(folder) if (Path(folder) / "tokenizer.json").is_file() else None
    return Model(config, params, tokenizer, weights_id)


def load_weights(
    folder: str | Path, *, dtype: str = "auto", longest_request: int | None = None
) -> tuple[ModelConfig, Params, str]:
    """What `load_hf` loads, without the tokenizer: the config, the parameters and the weights' id."""
    folder = Path(folder)
    config = config_from_hf(read_json(folder / "config.json")).for_requests(longest_request)
    shards = open_shards(folder)
    shapes = {name: entry.shape for name, entry in shards.entries.items()}
    source = TensorSource(str(folder), shapes, shards.read)
    fused = FAMILIES[config.family].fused
    return config, assemble(config, source, dtype=parameter_dtype(dtype), fused=fused), shards.digest()


def parameter_dtype(dtype: str) -> Any:
    """The dtype that a name stands for on this machine.

    Raises:
        ValueError: not one of the three names.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}.")
    if dtype == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(dtype)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is absent or is no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is absent. Give a model folder in Hugging Face layout.")
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return content
