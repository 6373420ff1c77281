"""Both language models: shapes, causality, options that must change nothing, and initial loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_modules import block_in_numpy, readout_in_numpy

from kuramoto_jax.baselines import TransformerLM, build
from kuramoto_jax.config import ModelConfig
from kuramoto_jax.data import read_stdlib
from kuramoto_jax.loss import next_byte_loss
from kuramoto_jax.model import KuramotoLM

SIZES = {"layers": 2, "width": 8, "heads": 2, "hidden": 12, "unroll": 1}
CONFIGS = {
    "kuramoto": ModelConfig(**SIZES),
    "transformer": ModelConfig(name="transformer", **SIZES),
}
BATCH, TOKENS = 2, 6
QUICK = {"xla_backend_optimization_level": 0}  # compile fast, run slowly

both = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def text(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.int32)


@functools.cache
def parameters(config):
    """Parameters moved off their initial values by noise, so that nothing is zero or equal."""
    model, rng = build(config), np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(0.2, 0.5, p.shape), p.dtype), shapes)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def logits_of(model, params, tokens):
    return model.apply({"params": params}, tokens)


def logits(config, tokens):
    return np.asarray(logits_of(build(config), parameters(config), jnp.asarray(tokens)))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def value_and_slopes(model, params, tokens):
    def loss(params):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return jnp.sum(next_byte_loss(logits, tokens[:, 1:])[0]), logits

    slopes, logits = jax.grad(loss, has_aux=True)(params)
    return logits, slopes


def test_build_picks_the_model():
    assert isinstance(build(CONFIGS["kuramoto"]), KuramotoLM)
    assert isinstance(build(CONFIGS["transformer"]), TransformerLM)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_float32_for_every_token_and_symbol(config, dtype):
    model = build(dataclasses.replace(config, dtype=dtype, symbols=31))
    tokens = jax.ShapeDtypeStruct((3, 5), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    result = jax.eval_shape(model.apply, shapes, tokens)
    assert (result.shape, result.dtype) == ((3, 5, 31), jnp.float32)
    assert {p.dtype for p in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


def test_kuramoto_model_in_numpy():
    config, tokens = CONFIGS["kuramoto"], text(BATCH, TOKENS)
    params = parameters(config)
    table = params["embed"]["phases"]
    for row, found in zip(tokens, logits(config, tokens), strict=True):
        theta = np.asarray(table)[row]
        for layer in range(config.layers):
            blocks = jax.tree.map(lambda p, layer=layer: p[layer], params["blocks"])
            theta = block_in_numpy(config, blocks, theta)
        expected = readout_in_numpy(params["readout"], theta, table)
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)


# Causality


@both
@pytest.mark.parametrize("changed", [0, 1, 3, TOKENS - 1])
def test_a_changed_byte_moves_its_own_logits_and_later_ones(config, changed):
    tokens = text(BATCH, TOKENS)
    other = tokens.copy()
    other[0, changed] = (other[0, changed] + 1) % 256
    change = np.abs(logits(config, other) - logits(config, tokens)).max(axis=-1)
    assert np.all(change[0, :changed] == 0)
    assert np.all(change[0, changed:] > 1e-4)
    assert np.all(change[1] == 0)  # nor the other text of the batch


@both
def test_nothing_flows_back_and_nothing_across_the_batch(config):
    model, params = build(config), parameters(config)
    state = jnp.asarray(np.random.default_rng(3).normal(0, 1, (BATCH, 4, 8)), jnp.float32)

    def through(state):
        apply = functools.partial(model.apply, method=lambda m, x: m.blocks(x, None, 0)[0])
        return apply({"params": params}, state)

    slopes = jax.jit(jax.jacobian(through), compiler_options=QUICK)(state)
    jacobian = np.abs(np.asarray(slopes)).max(axis=(2, 5))
    for b in range(BATCH):
        np.testing.assert_array_equal(np.triu(jacobian[b, :, b], 1), 0)
        assert np.all(jacobian[b, :, b][np.tril_indices(4)] > 1e-6)
        np.testing.assert_array_equal(jacobian[b, :, 1 - b], 0)


@both
def test_equal_rows_have_equal_logits_in_any_company(config):
    tokens = text(BATCH, TOKENS)
    tokens[1] = tokens[0]
    found = logits(config, tokens)
    np.testing.assert_array_equal(found[0], found[1])
    swapped = text(BATCH, TOKENS)
    straight = logits(config, swapped)
    np.testing.assert_array_equal(logits(config, swapped[::-1].copy()), straight[::-1])


# Options that must change nothing


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("kuramoto", {"remat": True, "unroll": 2}),
        ("kuramoto", {"implementation": "reference"}),
        ("transformer", {"implementation": "reference"}),
    ],
    ids=str,
)
def test_how_it_is_computed_changes_no_logit_and_no_gradient(name, fields):
    config = CONFIGS[name]
    tokens, params = jnp.asarray(text(BATCH, TOKENS)), parameters(config)
    expected = value_and_slopes(build(config), params, tokens)
    found = value_and_slopes(build(dataclasses.replace(config, **fields)), params, tokens)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = 1 + np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * scale)


@both
def test_every_parameter_has_a_gradient(config):
    tokens = jnp.asarray(text(BATCH, TOKENS))
    _, slopes = value_and_slopes(build(config), parameters(config), tokens)
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        assert np.all(np.isfinite(slope)), path
        assert np.abs(slope).max() > 1e-6, path


# At the start


SHIPPED = {
    "kuramoto": ModelConfig(),
    "transformer": ModelConfig(name="transformer", layers=5, hidden=344),
}


@pytest.mark.parametrize("config", SHIPPED.values(), ids=SHIPPED)
def test_initial_loss_is_that_of_a_guess(config):
    model, corpus = build(dataclasses.replace(config, unroll=1)), read_stdlib()
    starts = np.linspace(0, len(corpus) - 65, 16).astype(int)
    tokens = jnp.asarray(np.stack([corpus[s : s + 65] for s in starts]), jnp.int32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def loss(key):
        params = model.init(key, tokens[:1, :1])["params"]
        total, count = next_byte_loss(
            model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:]
        )
        return jnp.sum(total) / jnp.sum(count)

    assert float(loss(jax.random.key(0))) == pytest.approx(5.55, abs=0.15)
