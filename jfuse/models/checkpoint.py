"""Saves a model as an Orbax checkpoint and loads it again: no renaming, no dequantising, and a strict comparison first.

In and out: a `Model`. The folder holds `jfuse.json` (config, dtype, digest of the weights), `params` (Orbax) and the
tokenizer's files.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jfuse.models.config import ModelConfig
from jfuse.models.decoder import Model
from jfuse.models.load import parameter_dtype, read_json
from jfuse.models.params import Params, build_params, digest_params, param_shapes
from jfuse.models.params import Path as ParamPath
from jfuse.models.rope import LongRope, Rope
from jfuse.models.tokenizer_files import read_tokenizer, write_tokenizer

MARKER, WEIGHTS = "jfuse.json", "params"
FORMAT_VERSION = 1


def is_checkpoint(folder: str | Path) -> bool:
    """Whether `save_checkpoint` wrote this folder."""
    return (Path(folder) / MARKER).is_file()


def save_checkpoint(model: Model, folder: str | Path) -> Path:
    """Writes the model's config, weights and tokenizer; the folder appears only when it is complete.

    The weights' identity is the digest of the values written, which differs from that of the checkpoint they came from:
    chunks encoded by the original are not taken for this model's.

    Raises:
        ValueError: the folder exists and is not empty.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; give a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(partial / WEIGHTS, args=ocp.args.PyTreeSave(model.params))
        if model.tokenizer is not None:
            write_tokenizer(model.tokenizer, partial)
        config = model.config
        if config.longrope is not None:
            config = dataclasses.replace(config, rope=config.longrope.short)
        content = {
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(config),
            "dtype": np.dtype(model.dtype).name,
            "weights_id": digest_params(model.params),
        }
        (partial / MARKER).write_text(json.dumps(content, indent=2, allow_nan=False), encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp's folders are private
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_checkpoint(
    folder: str | Path, *, dtype: str = "auto", longest_request: int | None = None, config: ModelConfig | None = None
) -> Model:
    """The model that `save_checkpoint` wrote.

    Args:
        dtype: of the parameters in memory, whatever the stored one.
        longest_request: positions of the longest request to be served.
        config: what the weights must fit; by default the config stored beside them.

    Raises:
        ValueError: no such checkpoint; tensors missing, unused or of the wrong shape (listed, before any is read); or
            weights that are not the ones that were saved.
    """
    folder = Path(folder).absolute()
    content = read_json(folder / MARKER)
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder / MARKER} has format {content.get('format_version')!r}; this jfuse reads {FORMAT_VERSION}. "
            "Run jfuse convert again."
        )
    config = config or config_from_json(content.get("config"), origin=str(folder / MARKER))
    params = _restore(folder, config)
    weights_id = digest_params(params)
    if weights_id != content.get("weights_id"):
        raise ValueError(
            f"{folder}: the weights are not those that were saved (digests differ). Run jfuse convert again."
        )
    tokenizer = read_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    wanted = np.dtype(parameter_dtype(dtype))
    params = jax.tree.map(lambda leaf: jax.device_put(leaf.astype(wanted, copy=False)), params)
    return Model(config.for_requests(longest_request), params, tokenizer, weights_id)


def config_from_json(fields: Any, *, origin: str) -> ModelConfig:
    """A config from `dataclasses.asdict`'s output after a round trip through JSON.

    Raises:
        ValueError: a field is missing, unknown or of another type.
    """
    if not isinstance(fields, Mapping):
        _damaged(origin, "config", fields)
    ropes: dict[str, Any] = {"rope": _rope(fields.get("rope"), origin)}
    if (longrope := fields.get("longrope")) is not None:
        if not isinstance(longrope, Mapping) or set(longrope) != {"short", "long", "boundary"}:
            _damaged(origin, "longrope", longrope)
        if type(longrope["boundary"]) is not int:
            _damaged(origin, "longrope.boundary", longrope["boundary"])
        short, long = (_rope(longrope[name], origin) for name in ("short", "long"))
        ropes["longrope"] = LongRope(short, long, longrope["boundary"])
    values = {**fields, "longrope": None, **ropes}
    kinds = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    if set(values) != set(kinds):
        _damaged(origin, "config's fields", sorted(set(values) ^ set(kinds)))
    for name, kind in kinds.items():
        if kind in (int, float, bool, str) and type(values[name]) is not kind:
            _damaged(origin, name, values[name])
    return ModelConfig(**values)


def _rope(fields: Any, origin: str) -> Rope:
    if not isinstance(fields, Mapping) or set(fields) != {"kind", "inv_freq", "attention_factor"}:
        _damaged(origin, "rope", fields)
    frequencies = fields["inv_freq"]
    if not isinstance(frequencies, list) or not all(type(value) is float for value in frequencies):
        _damaged(origin, "rope.inv_freq", frequencies)
    if not isinstance(fields["kind"], str) or type(fields["attention_factor"]) is not float:
        _damaged(origin, "rope", fields)
    return Rope(fields["kind"], tuple(frequencies), fields["attention_factor"])


def _damaged(origin: str, name: str, value: Any) -> NoReturn:
    raise ValueError(f"{origin}: {name} is {value!r}, which no jfuse convert writes. Run jfuse convert again.")


def _restore(folder: Path, config: ModelConfig) -> Params:
    """The stored parameters as NumPy arrays of the stored dtype, if they are exactly those that the config needs.

    Orbax fills what it finds and leaves the rest, so the comparison is made here, on its metadata.
    """
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            stored = checkpointer.metadata(folder / WEIGHTS).item_metadata.tree
        except Exception as error:  # Orbax raises many kinds
            raise ValueError(f"{folder / WEIGHTS} is no Orbax checkpoint: {error}. Run jfuse convert again.") from error
        leaves, _ = jax.tree_util.tree_flatten_with_path(stored)
        shapes = {tuple(str(getattr(key, "key", key)) for key in path): tuple(leaf.shape) for path, leaf in leaves}
        if faults := list(_faults(shapes, param_shapes(config))):
            raise ValueError(
                f"{folder}: the checkpoint does not fit the config ({config.family}, {config.num_layers} layers): "
                f"{'; '.join(faults)}. Use the {MARKER} that was written with it."
            )
        as_numpy = build_params(config, lambda path, shape: ocp.RestoreArgs(restore_type=np.ndarray))
        try:
            return checkpointer.restore(folder / WEIGHTS, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        except Exception as error:
            raise ValueError(f"{folder / WEIGHTS} is damaged: {error}. Run jfuse convert again.") from error


def _faults(
    stored: Mapping[ParamPath, tuple[int, ...]], expected: Mapping[ParamPath, tuple[int, ...]]
) -> Iterator[str]:
    """What is missing, unused or of the wrong shape; layers are counted, since every leaf of a block is stacked."""
    for path in sorted({*stored, *expected}):
        name, found, wanted = "/".join(path), stored.get(path), expected.get(path)
        if found is None:
            yield f"{name} is missing"
        elif wanted is None:
            yield f"{name} is unused"
        elif path[0] == "blocks" and found[1:] == wanted[1:] and found != wanted:
            fewer, more = sorted((found[0], wanted[0]))
            yield f"{name} layers {fewer}..{more - 1} are {'missing' if found[0] == fewer else 'unused'}"
        elif found != wanted:
            yield f"{name} is {list(found)}, the config needs {list(wanted)}"
