"""The decode cache that both language models share: keys and values of the last S tokens.

A cache is a ring: the token at position p lives in slot p mod S, so it holds a sliding window of S
tokens for as long as one cares to decode. Positions enter attention through their differences
alone, so decoding through the ring equals attention under a window mask of S tokens.
"""

import jax
import jax.numpy as jnp
from flax import struct

from kuramoto_jax import layer
from kuramoto_jax.kernels import dot

LayerCache = tuple[jax.Array, jax.Array]


class Cache(struct.PyTreeNode):
    """Keys and values of all layers.

    Attributes:
      key: [L, B, H, S, C], position already applied.
      value: [L, B, H, S, E].
      position: [] int32, tokens seen so far, which is the position of the next one.
    """

    key: jax.Array
    value: jax.Array
    position: jax.Array


def empty_cache(
    layers: int, batch: int, heads: int, slots: int, key_width: int, value_width: int, dtype: str
) -> Cache:
    """Returns a cache of `slots` tokens that has seen none."""
    shape = (layers, batch, heads, slots)
    return Cache(
        key=jnp.zeros((*shape, key_width), dtype),
        value=jnp.zeros((*shape, value_width), dtype),
        position=jnp.zeros((), jnp.int32),
    )


def chunk_positions(position: jax.Array | int, length: int) -> jax.Array:
    """Returns the positions [T] of a chunk of `length` tokens that starts at `position`."""
    return position + jnp.arange(length, dtype=jnp.int32)


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: LayerCache,
    position: jax.Array | int,
) -> tuple[jax.Array, LayerCache]:
    """Causal attention of a chunk of tokens to itself and to what the cache of one layer holds.

    Args:
      query: [B, H, T, C], scale included.
      key: [B, H, T, C] of the chunk.
      value: [B, H, T, E] of the chunk.
      cache: keys [B, H, S, C] and values [B, H, S, E] held.
      position: [] position of the chunk's first token.

    Returns:
      Output [B, H, T, E] in at least float32, and the cache with the chunk in.

    Raises:
      ValueError: if the chunk is longer than the cache.
    """
    cached_key, cached_value = cache
    length, slots = key.shape[2], cached_key.shape[2]
    if length > slots:
        raise ValueError(
            f"chunk of {length} tokens: must be at most the {slots} slots of the cache"
        )
    positions_T = chunk_positions(position, length)
    # Slot s holds the newest position before the chunk that is s modulo S, if there is one.
    slot_S = jnp.arange(slots, dtype=jnp.int32)
    held_S = position - 1 - (position - 1 - slot_S) % slots
    seen_TS = (held_S >= 0)[None, :] & (held_S[None, :] > positions_T[:, None] - slots)
    mask_TU = jnp.concatenate([seen_TS, jnp.tri(length, dtype=bool)], axis=1)

    def one_head(query: jax.Array, *parts: jax.Array) -> jax.Array:
        cached_key, key, cached_value, value = parts
        scores = [dot(query, cached_key, (1, 1)), dot(query, key, (1, 1))]
        weight_TU = layer.attention_weights(jnp.concatenate(scores, axis=1), mask_TU)
        weight_TU = weight_TU.astype(value.dtype)
        return dot(weight_TU[:, :slots], cached_value) + dot(weight_TU[:, slots:], value)

    output = jax.vmap(jax.vmap(one_head))(query, cached_key, key, cached_value, value)
    into = positions_T % slots
    cached_key = cached_key.at[:, :, into].set(key.astype(cached_key.dtype))
    cached_value = cached_value.at[:, :, into].set(value.astype(cached_value.dtype))
    return output, (cached_key, cached_value)
