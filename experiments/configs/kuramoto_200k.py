"""Kuramoto attention at about 0.2 million parameters: a comparison that two CPU cores can run.

    python -m experiments.enwik8 --config=experiments/configs/kuramoto_200k.py

216,329 parameters: 4 layers of 64 coordinates in 2 heads, feed-forward width 194. Its matched
baseline is transformer_200k.py (217,664), equal in data, batches, steps and schedule.

Budget: 1,500 steps of 32 windows of 128 bytes, 6 million bytes. Learning rates are the best of the
grid in docs/training.md, which also has the scores.
"""

from ml_collections import ConfigDict

from kuramoto_jax.config import Config


def get_config() -> ConfigDict:
    """Returns the configuration."""
    config = ConfigDict(Config().to_dict())
    config.data.source = "enwik8"
    config.data.window = 128

    config.model.name = "kuramoto"
    config.model.layers = 4
    config.model.width = 64
    config.model.heads = 2
    config.model.hidden = 194

    config.optim.learning_rate = 1.2e-2

    config.train.steps = 1500
    config.train.batch_size = 32
    config.train.log_every = 50
    config.train.eval_every = 250
    config.train.checkpoint_every = 250
    return config
