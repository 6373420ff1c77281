"""Strict JAX for every test: several CPU devices, no implicit promotion of ranks or types.

And what the tests of several commands share.
"""

import json
import sys

import jax
import pytest

from experiments import series

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Equal programs of a session are compiled once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def x64():
    """Float64 for one test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


# Commands that train several runs.

TINY = """
from ml_collections import ConfigDict
from kuramoto_jax.config import Config
def get_config():
    c = ConfigDict(Config().to_dict())
    c.model.update(layers=1, width=8, heads=2, hidden=8)
    c.data.update(source='file', path='text', window=16)
    c.train.update(steps=4, batch_size=4, log_every=2, eval_every=2, sample_length=0)
    c.train.update(tensorboard=False)
    return c
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory: a text, and a configuration file that trains on it."""
    monkeypatch.chdir(tmp_path)
    # ml_collections loads every configuration file into one module, over what was there.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    (tmp_path / "text").write_bytes(b"the cat sat on the mat. " * 100)
    (tmp_path / "tiny.py").write_text(TINY)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes a float with a count
        yield tmp_path


def score(config):
    """A made-up score: seeds differ much, and each change of the model adds its own amount."""
    changed = {"gates": 0.25, "value_gate": 0.5}
    added = sum(worth for name, worth in changed.items() if not getattr(config.model, name))
    return 2.0 + config.seed + added * (1 + config.seed / 4)


@pytest.fixture
def untrained(monkeypatch):
    """Runs are written at once, with made-up scores; returns the list of those asked for."""
    calls = []

    def fit(config, workdir, log):
        calls.append((str(workdir), config))
        workdir.mkdir(parents=True, exist_ok=True)
        steps, bpc = config.train.steps, score(config)
        summary = {"params": 10, "val_bpc": bpc, "test_bpc": bpc, "best_step": steps}
        summary |= {"steps": steps, "tokens": steps * 64, "seconds": 1.0}
        environment = {"device": "cpu", "data": {"sha256": "a" * 64, "description": "a text"}}
        for name, content in (
            ("config", config.to_dict()),
            ("summary", summary),
            ("environment", environment),
        ):
            (workdir / f"{name}.json").write_text(json.dumps(content))
        (workdir / "metrics.jsonl").write_text(json.dumps({"step": steps, "val_bpc": bpc}) + "\n")
        return summary

    monkeypatch.setattr(series, "fit", fit)
    return calls
