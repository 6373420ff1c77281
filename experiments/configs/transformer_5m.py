"""RoPE and SwiGLU transformer at about five million parameters on enwik8: the matched baseline.

    python -m experiments.enwik8 --config=experiments/configs/transformer_5m.py

5,070,080 parameters: 6 layers of width 256 in 8 heads, feed-forward width 744, tied embeddings.
Everything that does not belong to the network is that of kuramoto_5m.py (5,067,073), but for the
learning rates and the scale of the embeddings, which each model has its own best of.

Budget: that of kuramoto_5m.py. The paper reports a mean of 1.456 and a median of 1.452 validation
bpc over five seeds. Made for an accelerator, and not yet run to the end here, where there is none.
"""

from ml_collections import ConfigDict

from experiments.configs import kuramoto_5m


def get_config() -> ConfigDict:
    """Returns the configuration."""
    config = kuramoto_5m.get_config()
    config.model.name = "transformer"
    config.model.layers = 6
    config.model.hidden = 744
    config.model.embedding_std = 0.4
    config.optim.scalar_rate = 1.0
    config.optim.learning_rate = 3e-3
    return config
