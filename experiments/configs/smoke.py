"""Seconds on any machine: a run to see that everything works, not that it learns.

    python -m experiments.enwik8 --config=experiments/configs/smoke.py

Kuramoto attention, 2 layers, 27,269 parameters, on the standard library's sources.
"""

from ml_collections import ConfigDict

from kuramoto_jax.config import Config


def get_config() -> ConfigDict:
    """Returns the configuration."""
    config = ConfigDict(Config().to_dict())
    config.model.layers = 2
    config.model.width = 32
    config.model.heads = 2
    config.model.hidden = 64
    config.data.window = 64
    config.data.split = (0.998, 0.001, 0.001)
    config.train.steps = 20
    config.train.batch_size = 8
    config.train.log_every = 5
    config.train.eval_every = 10
    config.train.checkpoint_every = 10
    config.train.sample_length = 40
    return config
