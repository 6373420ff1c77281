"""The Kuramoto language model: bytes to logits."""

from typing import Any

import flax.linen as nn
import jax

from kuramoto_jax.cache import Cache, empty_cache
from kuramoto_jax.config import ModelConfig
from kuramoto_jax.modules import KuramotoBlock, PhaseEmbed, PhaseReadout, stack_blocks


def param_count(params: Any) -> int:
    """Returns the number of trainable scalars in a parameter tree, each array counted once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class KuramotoLM(nn.Module):
    """Phase embedding, a stack of Kuramoto blocks, readout by phase alignment.

    There is no normalisation, no value or output projection; the state stays a vector of angles
    from the first layer to the last (paper, section 2).
    """

    config: ModelConfig

    def setup(self) -> None:
        """Declares the parts."""
        self.embed = PhaseEmbed(self.config)
        self.blocks = stack_blocks(KuramotoBlock, self.config)
        self.readout = PhaseReadout(self.config)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns float32 logits [B, T, V] of int32 tokens [B, T]; logit t predicts token t + 1."""
        theta_BTD, _ = self.blocks(self.embed(tokens), None, 0)
        return self.readout(theta_BTD, self.embed.phases)

    def decode(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Continues a sequence: like `__call__` on the tokens seen so far and these, in one step.

        Args:
          tokens: [B, T] int32, the next tokens; any T up to the cache's slots.
          cache: from `init_cache` or an earlier call.

        Returns:
          Logits [B, T, V] for these tokens, and the cache with them in.
        """
        theta_BTD, (key, value) = self.blocks(
            self.embed(tokens), (cache.key, cache.value), cache.position
        )
        logits_BTV = self.readout(theta_BTD, self.embed.phases)
        return logits_BTV, Cache(key, value, cache.position + tokens.shape[1])

    @nn.nowrap
    def init_cache(self, batch: int, slots: int) -> Cache:
        """Returns an empty cache for `batch` sequences and a window of `slots` tokens."""
        config = self.config
        features = 2 * config.head_width
        return empty_cache(
            config.layers, batch, config.heads, slots, features, features, config.dtype
        )
