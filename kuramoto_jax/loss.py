"""Next-byte cross-entropy as sums and counts, and the unit it is reported in."""

import math

import jax
import jax.numpy as jnp


def next_byte_loss(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the next byte, summed and not averaged.

    sum = sum_t w_t (logsumexp_c logits_tc - logits_{t, target_t}), count = sum_t w_t

    Args:
      logits: [..., T, V].
      targets: [..., T] integers below V.
      weights: [..., T], 0 for what is not to be scored; None scores everything.

    Returns:
      (sum in nats, count), each [...] with the T axis summed, float32.
    """
    logits = logits.astype(jnp.float32)
    index = targets.astype(jnp.int32)[..., None]
    chosen = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    if weights is None:
        weights = jnp.ones_like(nats)
    weights = weights.astype(jnp.float32)
    return jnp.sum(nats * weights, axis=-1), jnp.sum(weights, axis=-1)


def bits(nats: float) -> float:
    """Converts nats to bits. For bytes, nats per byte become bits per character (one byte each)."""
    return nats / math.log(2.0)
