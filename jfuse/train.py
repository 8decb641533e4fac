"""Fits the weights of a `learned` selector to questions whose answers are marked, and keeps them with their model.

In come evidence and answer positions; out come `ScoreWeights`, which `select` takes as `params`, hard and unchanged.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import TokenView, check_choice
from jfuse.fingerprint import Fingerprint
from jfuse.models.decoder import Model
from jfuse.models.load import read_json
from jfuse.selectors.base import Selector
from jfuse.selectors.learned import ScoreWeights, equal_weights, features, learned, span_loss
from jfuse.selectors.score import Denominator
from jfuse.types import AnyArray, Evidence

FORMAT_VERSION = 1
SETTINGS, WEIGHTS = "learned.json", "weights"
Learnt = Literal["heads", "layers", "both"]


class Example(NamedTuple):
    """One question: what its heads see, where its answer stands, what a softmax may point at."""

    features: Float[AnyArray, "Lv N S"]
    span: Bool[AnyArray, " S"]
    context: Bool[AnyArray, " S"]


class Fit(NamedTuple):
    """The outcome of a fit."""

    weights: ScoreWeights
    losses: Float[np.ndarray, " _"]  # before each step
    num_dropped: int  # examples without a marked position


_features = jax.jit(features, static_argnames="denominator")


def example(evidence: Evidence, answer: Int[AnyArray, " E"], *, denominator: Denominator = "all") -> Example:
    """One training example.

    Args:
        answer: context positions of the answer's tokens, the prefix not counted (`Prompt.evidence`).
        denominator: that of the selector which is to use the weights.

    Raises:
        ValueError: a position outside the context.
    """
    context, at = np.asarray(evidence.segments) >= 0, np.asarray(answer, int)
    num_context = int(context.sum())
    if len(at) and not 0 <= at.min() <= at.max() < num_context:
        raise ValueError(
            f"answer holds positions {at.min()} to {at.max()}; use 0 to {num_context - 1}, counted from the first "
            "context token."
        )
    span = np.zeros(len(context), bool)
    span[np.flatnonzero(context)[at]] = True
    return Example(np.asarray(_features(evidence, denominator)), span, context)


def fit(
    examples: Iterable[Example],
    *,
    learn: Learnt = "heads",
    steps: int = 120,
    learning_rate: float = 0.02,
) -> Fit:
    """Minimises `span_loss` over all examples at once with Adam, weights kept non-negative by projection.

    Each head's feature is divided by its spread over the examples first; without that, nothing trains. "heads" and
    "layers" are convex problems; "both" is not, and gains nothing that "heads" cannot express.

    Raises:
        ValueError: no example with a marked position, or an unknown `learn`.
    """
    check_choice("learn", learn, get_args(Learnt))
    all_examples = list(examples)
    marked = [one for one in all_examples if np.asarray(one.span).any()]
    if not marked:
        raise ValueError(f"None of the {len(all_examples)} examples has a marked position; training needs span labels.")
    batch = stack(marked)
    start = equal_weights(*marked[0].features.shape[:2])._replace(scale=jnp.asarray(spread(marked)))
    chosen = {"heads": ("head",), "layers": ("layer",), "both": ("layer", "head")}[learn]
    values = {name: getattr(start, name) for name in chosen}
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
        values, losses = _descend(values, start, batch, steps, learning_rate)
    weights = ScoreWeights(*(np.asarray(leaf) for leaf in start._replace(**values)))
    return Fit(weights, np.asarray(losses), len(all_examples) - len(marked))


@functools.partial(jax.jit, static_argnames=("steps", "learning_rate"))
def _descend(
    values: dict[str, Array], start: ScoreWeights, batch: Example, steps: int, learning_rate: float
) -> tuple[dict[str, Array], Float[Array, " _"]]:
    optimiser = optax.adam(learning_rate)

    def loss(values):
        weights = start._replace(**values)
        return jax.vmap(span_loss, (None, 0, 0, 0))(weights, *batch).mean()

    def step(carry, _):
        values, state = carry
        value, gradient = jax.value_and_grad(loss)(values)
        updates, state = optimiser.update(gradient, state)
        values = optax.projections.projection_non_negative(optax.apply_updates(values, updates))
        return (values, state), value

    (values, _), losses = jax.lax.scan(step, (values, optimiser.init(values)), None, steps)
    return values, losses


def spread(examples: list[Example]) -> Float[np.ndarray, "Lv N"]:
    """Standard deviation of each head's feature over all context positions; features are centred already."""
    squares = sum(np.square(one.features).sum(-1) for one in examples)
    count = sum(int(np.asarray(one.context).sum()) for one in examples)
    return np.maximum(np.sqrt(np.asarray(squares) / count), 1e-6).astype(np.float32)


def stack(examples: list[Example]) -> Example:
    """All examples in one batch, padded at the end to the longest."""
    size = max(len(one.span) for one in examples)

    def padded(array: AnyArray) -> np.ndarray:
        array = np.asarray(array)
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])])

    return Example(*(np.stack([padded(part) for part in parts]) for parts in zip(*examples, strict=True)))


def save_weights(
    folder: str | Path,
    model: Model,
    weights: ScoreWeights,
    *,
    layers: tuple[int, ...] | None = None,
    tokens: TokenView = "anchors",
    anchor_ratio: float = 0.1,
    denominator: Denominator = "all",
) -> None:
    """Writes weights (Orbax) and what the selector that uses them was made with, under the model's fingerprint.

    Args:
        layers, tokens, anchor_ratio, denominator: the arguments of `selectors.learned`.

    Raises:
        ValueError: the folder exists, or the weights are not those of these layers.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    if folder.exists():
        raise ValueError(f"{folder} exists; give a new folder.")
    settings = {"layers": layers, "tokens": tokens, "anchor_ratio": anchor_ratio, "denominator": denominator}
    _check_shape(model, weights, learned(**settings))
    folder.mkdir(parents=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = {name: np.asarray(leaf, np.float32) for name, leaf in weights._asdict().items()}
        checkpointer.save(folder / WEIGHTS, args=ocp.args.PyTreeSave(tree))
    content = {"format_version": FORMAT_VERSION, "model": Fingerprint.of(model).model_digest, "settings": settings}
    (folder / SETTINGS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_weights(folder: str | Path, model: Model) -> tuple[Selector, ScoreWeights]:
    """The selector and the weights that `save_weights` wrote for this model.

    Raises:
        ValueError: no such folder, another format, or weights of another model; both fingerprints are named.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    content = read_json(folder / SETTINGS)
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has format {content.get('format_version')!r}; this jfuse reads {FORMAT_VERSION}. Train again."
        )
    Fingerprint.of(model).require_model(str(content.get("model")), what="set of learned weights")
    settings: dict[str, Any] = dict(content["settings"])
    settings["layers"] = None if settings["layers"] is None else tuple(settings["layers"])
    selector = learned(**settings)
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in ScoreWeights._fields}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(folder / WEIGHTS, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    weights = ScoreWeights(**{name: np.asarray(tree[name]) for name in ScoreWeights._fields})
    _check_shape(model, weights, selector)
    return selector, weights


def _check_shape(model: Model, weights: ScoreWeights, selector: Selector) -> None:
    shape = (len(selector.view.layer_indices(model.config.num_layers)), model.config.num_heads)
    if np.shape(weights.head) != shape or np.shape(weights.scale) != shape or np.shape(weights.layer) != shape[:1]:
        raise ValueError(
            f"The head weights have shape {np.shape(weights.head)}, but this selector scores {shape[0]} layers of "
            f"{shape[1]} heads; fit them on examples of the same view."
        )
