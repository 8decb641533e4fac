"""Label-free measures: how close a fused cache comes to full prefill, in what the model would say.

In come context caches and the tokens after them; out come teacher-forced logits and the figures made of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.config import Implementation
from jfuse.generate import padded_query
from jfuse.models.decoder import Model, logits, prefill
from jfuse.types import AnyArray, ContextCache


def answer_logits(
    model: Model,
    context: ContextCache,
    query: Int[AnyArray, " U"],
    reference: Int[AnyArray, " M"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "M V"]:
    """Teacher-forced logits at the M positions that predict the reference answer, over any state of the cache.

    Raises:
        ValueError: an empty reference.
    """
    if len(reference) == 0:
        raise ValueError("The reference answer has no tokens; give at least one.")
    tokens, positions = padded_query(np.concatenate([query, reference[:-1]]), context.end)
    hidden = prefill(model, tokens, positions, context, implementation=implementation).hidden
    return logits(model.config, model.params, hidden[len(query) - 1 : len(query) - 1 + len(reference)])


def kl_divergence(full: Float[AnyArray, "*B V"], other: Float[AnyArray, "*B V"]) -> Float[Array, "*B"]:
    """KL(full || other) of next-token distributions, in nats."""
    full, other = jax.nn.log_softmax(jnp.asarray(full)), jax.nn.log_softmax(jnp.asarray(other))
    return (jnp.exp(full) * (full - other)).sum(-1)


def answer_nll(logits: Float[AnyArray, "M V"], reference: Int[AnyArray, " M"]) -> Float[Array, ""]:
    """Negative log-likelihood of the reference answer, mean over its tokens, in nats."""
    log_probability = jax.nn.log_softmax(jnp.asarray(logits))
    return -jnp.take_along_axis(log_probability, jnp.asarray(reference)[:, None], axis=-1).mean()
