"""Implementations of softmax attention behind `kuramoto_jax.layer.kuramoto_attention`.

The layer reduces to attention on 2K features, softmax(q k^T) v with the scale folded into q. What
is here computes that for one head; batch and heads come from `jax.vmap`.
"""

import functools
import logging

import jax
import jax.numpy as jnp

from kuramoto_jax.kernels import cudnn, pallas
from kuramoto_jax.kernels.dense import dense, dense_general
from kuramoto_jax.kernels.xla import accumulation_dtype, attention, dot

__all__ = [
    "IMPLEMENTATIONS",
    "accumulation_dtype",
    "attention",
    "causal_attention",
    "cudnn",
    "dense",
    "dense_general",
    "dot",
    "pallas",
    "resolve",
]

IMPLEMENTATIONS = ("auto", "reference", "xla", "cudnn", "pallas")

# Scores that attention on a CPU works on at once, over heads: 4 MB of them stay in its caches.
CPU_SCORES = 2**20


def resolve(
    implementation: str,
    dtype: jnp.dtype,
    features: int,
    *,
    causal: bool = True,
    from_phases: bool = False,
) -> str:
    """Returns the implementation that runs where one is asked for.

    "auto" is "cudnn" where that works, else "xla". A request that cannot be met here falls back to
    "xla" and says so once, in the log of `kuramoto_jax`.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      dtype: compute type, that of the features.
      features: C = 2K, features of a head.
      causal: whether the mask is the causal one.
      from_phases: whether the caller has phases and gates, which is what "pallas" takes.

    Raises:
      ValueError: for an unknown name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}"
        )
    refused = ""
    if implementation in ("auto", "cudnn"):
        refused = cudnn.refusal(jnp.dtype(dtype), features) if causal else "the mask is not causal"
        if implementation == "auto":
            return "xla" if refused else "cudnn"
    if implementation == "pallas":
        refused = _pallas_refusal(features, causal, from_phases)
    if refused:
        _say_once(f"attention by {implementation} falls back to xla: {refused}")
    return "xla" if refused else implementation


def _pallas_refusal(features: int, causal: bool, from_phases: bool) -> str:
    if not from_phases:
        return "what is averaged is not the lift of the phases alone"
    if not causal:
        return "the mask is not causal"
    if not pallas.supports(features // 2):
        return f"{features // 2} coordinates a head are not a power of two from 16"
    return ""


@functools.cache
def _say_once(line: str) -> None:
    logging.getLogger("kuramoto_jax").warning(line)


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, implementation: str
) -> jax.Array:
    """Causal softmax attention of a batch of heads, as both language models call it.

    Args:
      query: [B, H, T, C], scale included.
      key: [B, H, T, C].
      value: [B, H, T, E].
      implementation: "reference" is `jax.nn.dot_product_attention`; the others as in
        `kuramoto_jax.layer.kuramoto_attention`.

    Returns:
      [B, H, T, E].

    A single CPU takes a few heads after another, so that what passes between the steps of the
    computation stays in its caches; an accelerator, or a mesh that shares the heads out, all at
    once.
    """
    chosen = resolve(implementation, query.dtype, query.shape[-1])
    if chosen == "cudnn":
        return cudnn.attention(query, key, value)
    if chosen == "reference":
        heads_last = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
        output = jax.nn.dot_product_attention(*heads_last, scale=1.0, is_causal=True)
        return output.transpose(0, 2, 1, 3)
    one_head = functools.partial(attention, causal=True)
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return jax.vmap(jax.vmap(one_head))(query, key, value)
    batch, heads, length, _ = query.shape
    each = tuple(x.reshape(batch * heads, *x.shape[2:]) for x in (query, key, value))
    output = jax.lax.map(
        lambda parts: one_head(*parts), each, batch_size=max(1, CPU_SCORES // length**2)
    )
    return output.reshape(batch, heads, length, -1)
