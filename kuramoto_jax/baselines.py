"""Models the layer is measured against, under the same call contract, and `build`.

The transformer is the usual strong one: pre-RMSNorm, rotary position, SwiGLU, tied embeddings.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from kuramoto_jax import cache as caching
from kuramoto_jax import kernels, layer
from kuramoto_jax.cache import Cache, LayerCache, empty_cache
from kuramoto_jax.config import ModelConfig
from kuramoto_jax.model import KuramotoLM
from kuramoto_jax.modules import position_rates, stack_blocks


def rotary(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotates pairs of features (x_j, x_{j + C/2}) by position (Su et al., arXiv:2104.09864).

    Args:
      x: [..., T, C].
      angle: [T, C/2] radians.

    Returns:
      [..., T, C] in the type of `x`; computed in float32.
    """
    angle = jnp.broadcast_to(angle, (*x.shape[:-1], angle.shape[-1]))
    return layer.rotate_features(x.astype(jnp.float32), angle).astype(x.dtype)


class TransformerBlock(nn.Module):
    """x += W_o attention(norm(x)), then x += SwiGLU(norm(x)); the stream x is float32."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, cache: LayerCache | None = None, position: jax.Array | int = 0
    ) -> tuple[jax.Array, LayerCache | None]:
        """Returns the new residual stream [B, T, D] and the extended cache."""
        config = self.config
        length, width = x_BTD.shape[1:]
        heads, head_width = config.heads, config.head_width
        norm = functools.partial(nn.RMSNorm, epsilon=1e-6)
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=config.dtype, dot_general=kernels.dense_general
        )
        residual_init = nn.initializers.variance_scaling(
            1.0 / (2 * config.layers), "fan_in", "truncated_normal"
        )

        y_BTD = norm(name="attention_norm")(x_BTD)
        query, key, value = (
            dense(width, name=name)(y_BTD)
            .reshape(-1, length, heads, head_width)
            .transpose(0, 2, 1, 3)
            for name in ("query", "key", "value")
        )
        rates = jnp.asarray(position_rates(config, head_width // 2), jnp.float32)
        positions_T = caching.chunk_positions(position, length)
        angle = layer.drift(rates, positions_T)
        query = rotary(query, angle) * jnp.asarray(1 / math.sqrt(head_width), query.dtype)
        key = rotary(key, angle)
        if cache is None:
            output = kernels.causal_attention(query, key, value, config.implementation)
        else:
            output, cache = caching.cached_attention(query, key, value, cache, position)
        output = output.transpose(0, 2, 1, 3).reshape(-1, length, width)
        update = dense(width, kernel_init=residual_init, name="output")(output)
        x_BTD = x_BTD + update.astype(x_BTD.dtype)

        y_BTD = norm(name="feedforward_norm")(x_BTD)
        hidden = nn.silu(dense(config.hidden, name="gate")(y_BTD)) * dense(
            config.hidden, name="up"
        )(y_BTD)
        update = dense(width, kernel_init=residual_init, name="down")(hidden)
        return x_BTD + update.astype(x_BTD.dtype), cache


class TransformerLM(nn.Module):
    """RoPE and SwiGLU transformer with pre-RMSNorm and tied embeddings.

    Logits are scaled by 1 / sqrt(D), so that they start small whatever the embedding's scale.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parts."""
        config = self.config
        self.embed = nn.Embed(
            config.symbols,
            config.width,
            embedding_init=nn.initializers.normal(config.embedding_std),
        )
        self.blocks = stack_blocks(TransformerBlock, config)
        self.norm = nn.RMSNorm(epsilon=1e-6)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns float32 logits [B, T, V] of int32 tokens [B, T]; logit t predicts token t + 1."""
        x_BTD, _ = self.blocks(self.embed(tokens), None, 0)
        return self._readout(x_BTD)

    def decode(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Continues a sequence; see `KuramotoLM.decode`."""
        x_BTD, (key, value) = self.blocks(
            self.embed(tokens), (cache.key, cache.value), cache.position
        )
        return self._readout(x_BTD), Cache(key, value, cache.position + tokens.shape[1])

    @nn.nowrap
    def init_cache(self, batch: int, slots: int) -> Cache:
        """Returns an empty cache for `batch` sequences and a window of `slots` tokens."""
        config, features = self.config, self.config.head_width
        return empty_cache(
            config.layers, batch, config.heads, slots, features, features, config.dtype
        )

    def _readout(self, x_BTD: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            self.norm(x_BTD).astype(self.config.dtype),
            self.embed.embedding.astype(self.config.dtype),
            (((2,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        ) * np.float32(1 / math.sqrt(self.config.width))


LanguageModel = KuramotoLM | TransformerLM


def build(config: ModelConfig) -> LanguageModel:
    """Returns the language model that a configuration names."""
    models: dict[str, type[LanguageModel]] = {
        "kuramoto": KuramotoLM,
        "transformer": TransformerLM,
    }
    return models[config.name](config)


def bigram_bpc(train: np.ndarray, heldout: np.ndarray) -> float:
    """Bits per character of a bigram model counted on one text and scored on another.

    P(b | a) = (n_ab + m P(b)) / (n_a + m), m = 4, with P(b) = (n_b + 1) / (N + 256): counts backed
    by the byte frequencies, so that no pair is impossible.

    Args:
      train: [N] uint8.
      heldout: [M] uint8, M > 1; its bytes 1 .. M - 1 are scored.
    """
    strength = 4.0
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=65536)
    pairs = pairs.reshape(256, 256)
    unigram = (np.bincount(train, minlength=256) + 1.0) / (train.size + 256.0)
    probability = (pairs + strength * unigram) / (pairs.sum(axis=1, keepdims=True) + strength)
    return float(-np.log2(probability[heldout[:-1], heldout[1:]]).mean())
