"""RoPE and SwiGLU transformer at about one million parameters on enwik8: the matched baseline.

    python -m experiments.enwik8 --config=experiments/configs/transformer_1m.py

1,022,336 parameters: 5 layers of width 128 in 4 heads, feed-forward width 344, tied embeddings.
Everything that does not belong to the network is that of kuramoto_1m.py (1,021,465), but for the
learning rates and the scale of the embeddings, which each model has its own best of.

Budget: that of kuramoto_1m.py. The paper reports 1.616 +- 0.004 validation bpc over seeds. Made
for an accelerator, and not yet run to the end here, where there is none. A run in small,
1,500 steps, is in docs/training.md.
"""

from ml_collections import ConfigDict

from experiments.configs import kuramoto_1m


def get_config() -> ConfigDict:
    """Returns the configuration."""
    config = kuramoto_1m.get_config()
    config.model.name = "transformer"
    config.model.layers = 5
    config.model.hidden = 344
    config.model.embedding_std = 0.4
    config.optim.scalar_rate = 1.0
    config.optim.learning_rate = 6e-3
    return config
