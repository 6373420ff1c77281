"""Attention by phase synchronisation, in JAX and Flax.

`kuramoto_jax.layer` holds the layer as pure functions of one head. Above it stand the linen modules
and language models; the training run is `kuramoto_jax.train.fit`.

Arrays carry their axes in their names, one letter an axis:

  B batch        T query positions    U key positions      H heads
  K coordinates of a head             D = H K coordinates of a token
  C = 2K features of a head           E features of a value
  F feed-forward width                V symbols            L layers
  N bytes of a corpus                 S slots of a cache   R rows of a block

and in `kuramoto_jax.groups`, for elements of a manifold:

  P numbers that hold an element      E numbers of an embedded one
  S numbers of a tangent step         R rates of a subgroup
"""

from kuramoto_jax.baselines import TransformerLM, build
from kuramoto_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from kuramoto_jax.layer import kuramoto_attention
from kuramoto_jax.model import KuramotoLM, param_count
from kuramoto_jax.modules import (
    KuramotoAttention,
    KuramotoBlock,
    PhaseEmbed,
    PhaseReadout,
    PhaseSwiGLU,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "KuramotoAttention",
    "KuramotoBlock",
    "KuramotoLM",
    "ModelConfig",
    "OptimConfig",
    "PhaseEmbed",
    "PhaseReadout",
    "PhaseSwiGLU",
    "TrainConfig",
    "TransformerLM",
    "build",
    "kuramoto_attention",
    "param_count",
]
