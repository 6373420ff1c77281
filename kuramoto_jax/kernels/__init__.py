"""Implementations of softmax attention behind `kuramoto_jax.layer.kuramoto_attention`.

The layer reduces to attention on 2K features, softmax(q k^T) v with the scale folded into q. What
is here computes that for one head; batch and heads come from `jax.vmap`.
"""

import functools

import jax

from kuramoto_jax.kernels.dense import dense, dense_general
from kuramoto_jax.kernels.xla import accumulation_dtype, attention, dot

__all__ = [
    "IMPLEMENTATIONS",
    "accumulation_dtype",
    "attention",
    "causal_attention",
    "dense",
    "dense_general",
    "dot",
    "resolve",
]

IMPLEMENTATIONS = ("auto", "reference", "xla")

# Scores that attention on a CPU works on at once, over heads: 4 MB of them stay in its caches.
CPU_SCORES = 2**20


def resolve(implementation: str) -> str:
    """Returns the implementation that a request stands for: "auto" becomes the best one here.

    Raises:
      ValueError: for an unknown name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}"
        )
    return "xla" if implementation == "auto" else implementation


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
    if resolve(implementation) == "reference":
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
