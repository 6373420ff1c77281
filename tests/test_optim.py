"""The optimizer: which parameter is in which group, how fast each moves, and when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kuramoto_jax.baselines import build
from kuramoto_jax.config import ModelConfig, OptimConfig
from kuramoto_jax.optim import group_labels, group_of, learning_rate, make_optimizer
from kuramoto_jax.train import init_params

SMALL = {"layers": 1, "width": 4, "heads": 2, "hidden": 4}
MODELS = [
    {},
    {"feedforward": "lift"},
    {"tied_readout": False},
    {"bound": "coordinate", "rates": "zero", "value_bias": "zeros"},
    {"remat": True, "dtype": "bfloat16"},
    {"name": "transformer"},
]
PARAMS = {
    "embed": {"phases": jnp.full((3, 2), 0.5), "embedding": jnp.full((3, 2), 0.5)},
    "blocks": {
        "attention": {
            "tau": jnp.ones(2),
            "omega": jnp.ones((2, 1)),
            "gate_q": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        },
        "attention_bound": {"radius": jnp.full((2,), 0.7)},
        "feedforward": {"gate": jnp.ones((2, 3)), "up": jnp.full((2, 3), -2.0)},
    },
    "norm": {"scale": jnp.ones(2)},
}
GATES = ("gate_q", "gate_k", "value_gate")
MATRICES = {"blocks/attention/gate_q/kernel", "blocks/feedforward/gate", "blocks/feedforward/up"}


@pytest.fixture(autouse=True)
def optax_promotes_types():
    with jax.numpy_dtype_promotion("standard"):
        yield


def flat(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@functools.cache
def compiled(config):
    """The optimizer of a run of ten steps, its update compiled (fast, to run slowly)."""
    optimizer = make_optimizer(config, 10)
    options = {"xla_backend_optimization_level": 0}
    return optimizer, jax.jit(optimizer.update, compiler_options=options)


def steps_of(config, gradients, params=PARAMS, state=None):
    """Yield the change, the state and the parameters after each gradient."""
    optimizer, update = compiled(config)
    state = optimizer.init(params) if state is None else state
    for gradient in gradients:
        change, state = update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, change)
        yield flat(change), state, params


def ones(value=1.0):
    return jax.tree.map(lambda p: jnp.full_like(p, value), PARAMS)


# Groups


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_every_parameter_is_in_its_group(fields):
    model = build(ModelConfig(**SMALL, **fields))
    shapes = jax.eval_shape(functools.partial(init_params, model, 0))
    labels, names = group_labels(shapes), set()
    for path, label in jax.tree_util.tree_leaves_with_path(labels):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        last = name.split("/")[-1]
        expected = {"phases": "phase", "embedding": "embedding", "omega": "omega"}.get(last)
        if expected is None:
            expected = "matrix" if last in ("kernel", "gate", "up") else "scalar"
        if name.split("/")[-2:] in ([gate, "kernel"] for gate in GATES):
            expected = "gate"
        assert label == expected, name
        names.add(last)
    assert "kernel" in names
    assert ("tau" in names) == (model.config.name == "kuramoto")
    jax.eval_shape(make_optimizer(OptimConfig(), 10).init, shapes)


@pytest.mark.parametrize("path", ["blocks/attention/mystery", "kernels", "tau/x", "mytau", ""])
def test_a_path_in_no_group_is_an_error_that_names_it(path):
    with pytest.raises(ValueError, match=f"'{path}' is in no group"):
        group_of(path)


def test_a_parameter_in_no_group_is_an_error():
    with pytest.raises(ValueError, match="'blocks/mystery'"):
        group_labels({"blocks": {"mystery": jnp.ones(1), "kernel": jnp.ones(1)}})


# Decay and rates


def test_without_gradient_only_matrices_shrink():
    config = OptimConfig(learning_rate=0.1, gate_rate=1.0, weight_decay=0.2, warmup=0.0)
    ((change, _, _),) = steps_of(config, [ones(0.0)])
    for name, value in flat(PARAMS).items():
        expected = -0.1 * 0.2 * value if name in MATRICES else 0 * value
        np.testing.assert_allclose(change[name], expected, rtol=1e-6, err_msg=name)


def test_no_decay():
    ((change, _, _),) = steps_of(OptimConfig(weight_decay=0.0), [ones(0.0)])
    assert all(np.all(value == 0) for value in change.values())


@pytest.mark.parametrize("sign", [1.0, -1e-3])
def test_first_step_has_the_size_of_the_rate_of_its_group(sign):
    rates = {"phase": 7.0, "embedding": 0.5, "gate": 0.3, "omega": 0.25, "scalar": 2.0}
    config = OptimConfig(
        learning_rate=0.01,
        weight_decay=0.0,
        warmup=0.0,
        clip=0.0,
        **{f"{group}_rate": rate for group, rate in rates.items()},
    )
    ((change, _, _),) = steps_of(config, [ones(sign)])
    for name, value in change.items():
        rate = 0.01 * rates.get(group_of(name), 1.0)
        np.testing.assert_allclose(value, -np.sign(sign) * rate, rtol=1e-4, err_msg=name)


def test_a_rate_of_zero_holds_its_group():
    still = ("phase", "embedding", "gate", "omega", "scalar")
    config = OptimConfig(**{f"{group}_rate": 0.0 for group in still})
    ((change, _, _),) = steps_of(config, [ones()])
    for name, value in change.items():
        assert np.all(value == 0) == (group_of(name) in still), name


def test_clipping_acts_on_the_global_norm():
    size = sum(p.size for p in jax.tree.leaves(PARAMS))
    small = ones(1.0 / np.sqrt(size))  # norm 1
    large = ones(100.0 / np.sqrt(size))
    # Adam forgets the size of equal gradients, so the second one tells whether the first was cut
    config = {"weight_decay": 0.0, "warmup": 0.0}
    last = {}
    for clip in (0.0, 1.0):
        for name, first in (("small", small), ("large", large)):
            optimizer = OptimConfig(clip=clip, **config)
            *_, (change, _, _) = steps_of(optimizer, [first, small])
            last[clip, name] = change["norm/scale"][0]
    assert last[1.0, "large"] == pytest.approx(last[1.0, "small"], rel=1e-4)
    assert last[0.0, "small"] == pytest.approx(last[1.0, "small"], rel=1e-4)
    assert abs(last[0.0, "large"]) < 0.9 * abs(last[0.0, "small"])


def test_zero_gradients_stay_finite():
    *_, (change, state, params) = steps_of(OptimConfig(), [ones(0.0)] * 3)
    for leaf in jax.tree.leaves((change, state, params)):
        assert np.all(np.isfinite(leaf))


# Schedule


@pytest.mark.parametrize("steps", [1, 2, 3, 20, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5, 1.0])
def test_schedule(steps, warmup):
    config = OptimConfig(learning_rate=0.5, warmup=warmup, final=0.1)
    rate = np.array([float(learning_rate(config, steps)(step)) for step in range(steps + 1)])
    rise = round(warmup * steps)
    assert np.all(np.isfinite(rate))
    assert rate[0] > 0
    np.testing.assert_allclose(rate[:rise], 0.5 * np.arange(1, rise + 1) / (rise + 1), rtol=1e-5)
    assert rate[rise] == rate.max() == pytest.approx(0.5)
    if rise < steps:
        assert rate[steps] == pytest.approx(0.05, rel=1e-5)
        assert np.all(np.diff(rate[rise:]) < 0)
    # halfway down the cosine the rate is halfway between the peak and the end
    if (steps - rise) % 2 == 0 and rise < steps:
        assert rate[(steps + rise) // 2] == pytest.approx(0.275, rel=1e-5)


def test_without_a_final_fraction_the_rate_ends_at_zero():
    assert float(learning_rate(OptimConfig(final=0.0), 50)(50)) == pytest.approx(0, abs=1e-9)
    level = learning_rate(OptimConfig(final=1.0, warmup=0.0, learning_rate=0.5), 50)
    assert [float(level(step)) for step in (0, 25, 50)] == pytest.approx([0.5] * 3)


def test_each_step_takes_the_rate_of_its_number_and_a_resumed_run_too():
    config = OptimConfig(weight_decay=0.0, clip=0.0, warmup=0.3)
    schedule = learning_rate(config, 10)
    whole = list(steps_of(config, [ones()] * 10))
    for step, (change, _, _) in enumerate(whole):
        expected = -float(schedule(step))
        np.testing.assert_allclose(change["blocks/feedforward/up"], expected, rtol=1e-3)

    _, state, params = whole[5]
    stored = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)
    rest = list(steps_of(config, [ones()] * 4, params, stored))
    for (resumed, _, _), (expected, _, _) in zip(rest, whole[6:], strict=True):
        for name, value in expected.items():
            np.testing.assert_array_equal(resumed[name], value, err_msg=name)
