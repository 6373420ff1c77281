"""Configuration: what can be set, what is refused and how, and the parameter counts it promises."""

import copy
import dataclasses
import functools
import importlib
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import experiments.configs
from kuramoto_jax.baselines import build
from kuramoto_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    flatten,
    options,
    parameter_budget,
    unknown_key,
)
from kuramoto_jax.train import init_params

CONFIGS = sorted(Path(experiments.configs.__file__).parent.glob("[a-z]*.py"))


def nested(key, value):
    """Turn {"a.b": x} into {"a": {"b": x}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def load(name):
    module = importlib.import_module(f"experiments.configs.{name}")
    return Config.from_mapping(module.get_config()), module.__doc__


def error_of(mapping):
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(mapping)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Setting

# What cannot be derived from the default: keys that need company, or a value of their own.
VALUES = {
    "model.name": "transformer",
    "model.width": 132,
    "model.heads": 8,
    "model.phase_spread": 1.0,
    "data.source": "enwik8",
    "data.path": "corpus.gz",
    "data.split": (0.8, 0.1, 0.1),
}
COMPANY = {
    "model.embedding_std": {"model": {"name": "transformer"}},
    "data.path": {"data": {"source": "file"}},
}


def another(key, field):
    """Return a valid value of a key that is not its default."""
    if key in VALUES:
        return VALUES[key]
    if field.metadata["choices"]:
        return field.metadata["choices"][
            -1 if field.default != field.metadata["choices"][-1] else 0
        ]
    if isinstance(field.default, bool):
        return not field.default
    return field.default + 1 if isinstance(field.default, int) else field.default / 2


@pytest.mark.parametrize(("key", "field"), options().items())
def test_every_key_is_settable(key, field):
    value = another(key, field)
    mapping = copy.deepcopy(COMPANY.get(key, {}))
    *groups, name = key.split(".")
    group = functools.reduce(lambda m, g: m.setdefault(g, {}), groups, mapping)
    group[name] = value
    config = Config.from_mapping(mapping)
    assert flatten(config.to_dict())[key] == value != field.default
    assert config != Config()
    assert field.metadata["help"].strip()
    # and it survives being written down
    assert Config.from_mapping(config.to_dict()) == config
    assert Config.from_mapping(json.loads(json.dumps(config.to_dict()))) == config


def test_options_are_the_keys_of_a_configuration_with_its_defaults():
    assert {key: field.default for key, field in options().items()} == flatten(Config().to_dict())


def test_keys_left_out_take_their_defaults():
    assert Config.from_mapping({}) == Config()
    assert Config.from_mapping({"model": {}, "seed": 3}) == Config(seed=3)
    assert Config.from_mapping({"optim": {"clip": 0.0}}).optim == OptimConfig(clip=0.0)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.width = 1


# Refusing


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("optim.learning_rat", "optim.learning_rate"),
        ("model.widht", "model.width"),
        ("train.batchsize", "train.batch_size"),
        ("optim.batch_size", "train.batch_size"),
        ("data.layers", "model.layers"),
        ("learning_rate", "optim.learning_rate"),
        ("window", "data.window"),
        ("sed", "seed"),
    ],
)
def test_unknown_key_is_named_with_what_was_meant(key, suggestion):
    message = error_of(nested(key, 1))
    assert message == unknown_key(key)
    assert message.startswith(f"{key}: unknown key")
    assert re.search(rf"\b{re.escape(suggestion)}\b", message.split(";")[1])


def test_unknown_key_without_a_likeness_points_to_the_list():
    assert "--help" in error_of({"zzzzzz": 1})


@pytest.mark.parametrize("group", ["", "model.", "data.", "optim.", "train."])
def test_right_name_in_the_wrong_group_is_told_its_group(group):
    for key in options():
        misplaced = group + key.split(".")[-1]
        if misplaced not in options():
            assert key in unknown_key(misplaced)


def test_a_key_deeper_or_shallower_than_declared():
    assert error_of({"model": 3}).startswith("model=3: must be a group")
    assert error_of(nested("seed.value", 3)).startswith("seed={'value': 3}: must be a whole")
    assert error_of(nested("optim.clip.norm", 3.0)).startswith("optim.clip={'norm': 3.0}: must be")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.layers", 2.0, "a whole number"),
        ("model.layers", True, "a whole number"),
        ("model.layers", "2", "a whole number"),
        ("model.layers", None, "a whole number"),
        ("seed", 1.5, "a whole number"),
        ("optim.learning_rate", "0.1", "a number"),
        ("optim.learning_rate", False, "a number"),
        ("optim.clip", None, "a number"),
        ("model.remat", 1, "True or False"),
        ("model.remat", "false", "True or False"),
        ("model.name", 3, "a text"),
        ("data.path", None, "a text"),
        ("data.split", 0.9, "3 numbers"),
        ("data.split", (0.9, 0.1), "3 numbers"),
        ("data.split", "0.9", "3 numbers"),
        ("data.split", ("0.8", 0.1, 0.1), "a number"),
    ],
)
def test_wrong_type(key, value, words):
    message = error_of(nested(key, value))
    assert message.startswith(f"{key}=")
    assert message.endswith(f"must be {words}")


def test_whole_numbers_are_numbers():
    config = Config.from_mapping({"optim": {"clip": 2}, "data": {"split": [0.5, 0.25, 0.25]}})
    assert (config.optim.clip, type(config.optim.clip)) == (2.0, float)
    assert config.data.split == (0.5, 0.25, 0.25)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", [k for k, f in options().items() if isinstance(f.default, float)])
def test_not_finite(key, value):
    mapping = copy.deepcopy(COMPANY.get(key, {}))
    group, name = key.split(".")
    mapping.setdefault(group, {})[name] = value
    assert error_of(mapping) == f"{key}={value}: must be a finite number"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.layers", 0, "at least 1"),
        ("model.width", -4, "at least 1"),
        ("model.rate_base", 1.0, "above 1"),
        ("model.tau", 0.0, "above 0"),
        ("model.phase_spread", 3.2, "at most 3.14159"),
        ("data.window", 0, "at least 1"),
        ("optim.learning_rate", 0.0, "above 0"),
        ("optim.learning_rate", -1e-3, "above 0"),
        ("optim.warmup", 1.5, "at most 1"),
        ("optim.warmup", -0.1, "at least 0"),
        ("optim.beta2", 1.0, "at most 0.99999"),
        ("optim.clip", -1.0, "at least 0"),
        ("optim.phase_rate", -1.0, "at least 0"),
        ("train.steps", 0, "at least 1"),
        ("train.batch_size", 0, "at least 1"),
        ("train.eval_every", 0, "at least 1"),
        ("train.checkpoint_every", 0, "at least 1"),
        ("train.keep", 0, "at least 1"),
        ("train.sample_length", -1, "at least 0"),
    ],
)
def test_out_of_range(key, value, words):
    assert error_of(nested(key, value)) == f"{key}={value}: must be {words}"


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_seed_out_of_range(seed):
    assert error_of({"seed": seed}).startswith(f"seed={seed}: must be from 0")
    assert Config(seed=2**31 - 1).seed == 2**31 - 1


@pytest.mark.parametrize("key", [k for k, f in options().items() if f.metadata["choices"]])
def test_not_among_the_choices(key):
    message = error_of(nested(key, "nonsense"))
    assert message.startswith(f"{key}='nonsense': must be one of ")
    for choice in options()[key].metadata["choices"]:
        assert choice in message


def test_heads_must_divide_the_width():
    message = error_of({"model": {"width": 130, "heads": 4}})
    assert message.startswith("model.width=130")
    assert "model.heads=4" in message
    assert message.endswith("128 or 132")
    assert error_of({"model": {"width": 2, "heads": 4}}).endswith("such as 4")


def test_rotary_position_needs_an_even_head():
    odd = {"width": 12, "heads": 4}
    assert Config.from_mapping({"model": odd}).model.head_width == 3
    message = error_of({"model": {**odd, "name": "transformer"}})
    assert message.startswith("model.width=12")
    assert "model.heads=4" in message
    assert "even" in message


OWNED = [(k, f) for k, f in options().items() if f.metadata.get("model")]


@pytest.mark.parametrize(("key", "field"), OWNED)
def test_a_field_of_the_other_model_is_refused(key, field):
    owner = field.metadata["model"]
    other = {"kuramoto": "transformer", "transformer": "kuramoto"}[owner]
    name = key.split(".")[1]
    message = error_of({"model": {"name": other, name: another(key, field)}})
    assert message.startswith(f"{key}={another(key, field)!r}: has no effect")
    assert f"model.name={other!r}" in message
    ModelConfig(name=other, **{name: field.default})


def test_each_model_has_fields_of_its_own():
    owners = [field.metadata["model"] for _, field in OWNED]
    assert set(owners) == {"kuramoto", "transformer"}


def test_a_ramp_must_rise():
    message = error_of({"model": {"phase_spread": 0.2, "phase_spread_min": 0.3}})
    assert message.startswith("model.phase_spread_min=0.3")
    assert "model.phase_spread=0.2" in message
    ModelConfig(phase_spread=0.2, phase_spread_min=0.2)
    ModelConfig(phase_spread=0.05, phase_init="uniform")


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ((0.9, 0.05, 0.06), "must sum to 1, sums to 1.01"),
        ((0.5, 0.25, 0.2), "must sum to 1, sums to 0.95"),
        ((0.9, 0.1, 0.0), "must be above 0"),
        ((1.2, -0.1, -0.1), "must be at most 1"),
    ],
)
def test_split_must_be_three_positive_parts_of_one(split, words):
    message = error_of({"data": {"split": split}})
    assert message.startswith("data.split=")
    assert message.endswith(words)


def test_split_is_summed_with_tolerance():
    assert DataConfig(split=(0.7, 0.2, 0.1)).split == (0.7, 0.2, 0.1)  # sums to 0.99999...


def test_gates_that_are_not_there_cannot_go_without_normalisation():
    message = error_of({"model": {"gates": False, "gate_normalization": False}})
    assert message.startswith("model.gate_normalization=False: has no effect")


def test_source_and_path_must_agree():
    assert error_of({"data": {"source": "file"}}).startswith("data.path=''")
    assert error_of({"data": {"path": "x"}}).startswith("data.path='x'")
    assert DataConfig(source="enwik8", path="x").path == "x"


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelConfig(layers=0),
        lambda: OptimConfig(learning_rate=-1.0),
        lambda: TrainConfig(steps=0),
        lambda: DataConfig(window=0),
        lambda: Config(seed=-1),
    ],
)
def test_construction_checks_too(make):
    with pytest.raises(ConfigError, match="must be"):
        make()


# Parameters


def count(model):
    shapes = jax.eval_shape(functools.partial(init_params, build(model), 0))
    parts = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        parts[name] = int(np.prod(leaf.shape))
    return parts


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layers": 1, "width": 6, "heads": 3, "hidden": 5, "symbols": 7},
        {"layers": 3, "width": 8, "heads": 1, "hidden": 12, "feedforward": "lift"},
        {"layers": 2, "width": 8, "heads": 2, "hidden": 12, "tied_readout": False},
        {"width": 8, "heads": 2, "gates": False, "drift": "none"},
        {"width": 8, "heads": 2, "value_gate": False, "drift": "fixed", "bound": "none"},
        {"width": 8, "heads": 2, "value_projection": True, "feedforward": "none"},
        {"width": 8, "heads": 2, "normalization": True, "hidden": 5},
        {"width": 8, "heads": 2, "normalization": True, "feedforward": "lift"},
        {"width": 8, "heads": 8, "bound": "coordinate", "rates": "zero", "dtype": "bfloat16"},
        {"name": "transformer"},
        {"name": "transformer", "layers": 5, "hidden": 344},
        {"name": "transformer", "layers": 1, "width": 12, "heads": 3, "hidden": 5, "symbols": 7},
    ],
)
def test_budget_is_the_true_count(fields):
    model = ModelConfig(**fields)
    budget, parts = parameter_budget(model), count(model)
    assert budget["total"] == sum(parts.values())
    assert sum(budget.values()) == 2 * budget["total"]
    patterns = {
        "embedding": r"^embed/",
        "attention": r"^blocks/(attention|query|key|value|output)(/|_bound)",
        "feedforward": r"^blocks/(feedforward|gate|up|down)(/|_bound)",
        "norms": r"^(blocks/)?(attention_|feedforward_)?norm/",
        "readout": r"^readout/",
    }
    for part in budget.keys() - {"total"}:
        found = sum(n for name, n in parts.items() if re.search(patterns[part], name))
        assert budget[part] == found, part


def test_budget_by_hand():
    # D = 6, H = 3, F = 5, V = 7, L = 1
    small = {"layers": 1, "width": 6, "heads": 3, "hidden": 5, "symbols": 7}
    kuramoto = parameter_budget(ModelConfig(**small))
    # three readouts with bias, of 4 x 2 in each of three heads, tau 3, omega 6, radius 6
    assert kuramoto == {
        "embedding": 42,
        "attention": 3 * (3 * 8 + 6) + 15,
        "feedforward": 96,
        "readout": 8,
        "total": 251,
    }
    # the same readouts, of 12 x 6
    whole = parameter_budget(ModelConfig(**small, gate_inputs="token"))
    assert whole["attention"] == 3 * (12 * 6 + 6) + 15


@pytest.mark.parametrize(
    ("batch_size", "microbatch", "valid"),
    [(12, 5, "4 or 6"), (7, 3, "1 or 7"), (4, 9, "2 or 4")],
)
def test_microbatch_divides_the_batch(batch_size, microbatch, valid):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(batch_size=batch_size, microbatch=microbatch)
    assert str(caught.value) == (
        f"train.microbatch={microbatch}: must divide train.batch_size={batch_size}, such as {valid}"
    )
    assert TrainConfig(batch_size=12, microbatch=4).microbatch == 4


# Shipped configurations


def test_there_are_configurations():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration_loads_and_tells_its_command_and_size(path):
    config, doc = load(path.stem)
    command = rf"python -m experiments\.enwik8 --config=experiments/configs/{path.name}(\s|$)"
    assert re.search(command, doc)
    assert re.search(rf"(?<![\d,]){parameter_budget(config.model)['total']:,}(?![\d,])", doc)


@pytest.mark.parametrize("size", ["1m", "5m"])
def test_shipped_pairs_are_matched(size):
    (kuramoto, _), (transformer, _) = load(f"kuramoto_{size}"), load(f"transformer_{size}")
    assert (kuramoto.model.name, transformer.model.name) == ("kuramoto", "transformer")
    one, other = (sum(count(config.model).values()) for config in (kuramoto, transformer))
    assert abs(one - other) < 0.01 * min(one, other)
    millions = int(size[0]) * 1e6
    assert 0.9 * millions < one < 1.15 * millions
    # the same budget and the same text
    assert (kuramoto.data, kuramoto.train) == (transformer.data, transformer.train)
