"""A run of a few steps on a short text, for the tests of the commands that read one."""

import jax

from experiments import enwik8


def train(folder, content, window, *flags):
    """Trains in `folder` on `content`, overriding the smoke run; returns the run's directory."""
    (folder / "content").write_bytes(content)
    flags += (
        "seed=1",
        "data.source=file",
        f"data.path={folder / 'content'}",
        f"data.window={window}",
        "data.split=(0.9, 0.05, 0.05)",
        "train.steps=4",
        "train.batch_size=8",
        "train.sample_length=0",
    )
    config = f"--config={enwik8.CONFIGS / 'smoke.py'}"
    overrides = [f"--config.{flag}" for flag in flags]
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes a float with a count
        assert enwik8.main([config, f"--workdir={folder / 'w'}", *overrides]) == 0
    return folder / "w"
