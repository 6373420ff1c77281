"""The quick start: a small Kuramoto model on the Python standard library's own sources.

    python -m experiments.enwik8 --config=experiments/configs/quickstart.py

216,329 parameters: 4 layers of 64 coordinates in 2 heads, feed-forward width 194. Needs no network
and no file. Expect 8 bpc at the start, about 2.6 after 100 steps and 2.07 validation bpc at the
end (a bigram model has 3.61), in under 3 minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from kuramoto_jax.config import Config


def get_config() -> ConfigDict:
    """Returns the configuration."""
    config = ConfigDict(Config().to_dict())
    config.data.source = "stdlib"
    config.data.split = (0.98, 0.01, 0.01)
    config.data.window = 128

    config.model.layers = 4
    config.model.width = 64
    config.model.heads = 2
    config.model.hidden = 194

    config.train.steps = 500
    config.train.batch_size = 32
    config.train.log_every = 20
    config.train.eval_every = 250
    config.train.checkpoint_every = 250
    return config
