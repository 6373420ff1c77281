"""RoPE and SwiGLU transformer at about 0.2 million parameters: the matched baseline.

    python -m experiments.enwik8 --config=experiments/configs/transformer_200k.py

217,664 parameters: 4 layers of width 64 in 2 heads, feed-forward width 176, tied embeddings.
Everything that does not belong to the network is that of kuramoto_200k.py (216,329), but for the
learning rates, which each model has its own best of (docs/training.md).
"""

from ml_collections import ConfigDict

from experiments.configs import kuramoto_200k


def get_config() -> ConfigDict:
    """Returns the configuration."""
    config = kuramoto_200k.get_config()
    config.model.name = "transformer"
    config.model.layers = 4
    config.model.hidden = 176
    config.model.embedding_std = 0.4
    config.optim.scalar_rate = 1.0
    config.optim.learning_rate = 1.2e-2
    return config
