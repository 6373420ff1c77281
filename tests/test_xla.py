"""Attention in row blocks against plain softmax attention in float64, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from kuramoto_jax import kernels
from kuramoto_jax.kernels import causal_attention, xla
from kuramoto_jax.kernels.xla import attention


# Compiled fast, to run slowly: compilation takes most of the time.
@functools.partial(
    jax.jit, static_argnames="causal", compiler_options={"xla_backend_optimization_level": 0}
)
def value_and_slopes(query, key, value, cotangent, mask=None, causal=False):
    output, pull = jax.vjp(lambda *args: attention(*args, mask, causal=causal), query, key, value)
    return output, pull(cotangent.astype(output.dtype))


def plain(query, key, value, cotangent, mask):
    """Softmax attention and its gradient with the whole matrix, in float64."""
    query, key, value, cotangent = (
        np.asarray(a).astype(np.float64) for a in (query, key, value, cotangent)
    )
    weights = reference.attention_weights(query @ key.T, mask)
    dweights = cotangent @ value.T
    dscore = weights * (dweights - (weights * dweights).sum(axis=1, keepdims=True))
    return weights @ value, (dscore @ key, dscore.T @ query, weights.T @ cotangent)


def inputs(queries, keys, dtype=np.float32, scale=1.0):
    """Random query [T, 4], key [U, 4], value [U, 6] and cotangent [T, 6]."""
    rng = np.random.default_rng(queries + keys)
    shapes = ((queries, 4), (keys, 4), (keys, 6), (queries, 6))
    query, *rest = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return query * jnp.asarray(scale, dtype), *rest


def check(actual, expected, tolerance):
    output, slopes = actual
    np.testing.assert_allclose(output, expected[0], rtol=0, atol=tolerance)
    for slope, other in zip(slopes, expected[1], strict=True):
        atol = tolerance * (1 + np.abs(other).max())
        np.testing.assert_allclose(slope.astype(jnp.float32), other, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("queries", "keys", "kind"),
    [
        (1, 1, "full"),
        (3, 70, "full"),
        (130, 65, "full"),
        (70, 3, "boolean"),
        (64, 65, "boolean"),
        (130, 65, "boolean"),
    ],
)
def test_full_and_boolean_masks(queries, keys, kind):
    args, mask = inputs(queries, keys), None
    if kind == "boolean":
        mask = np.random.default_rng(0).uniform(size=(queries, keys)) < 0.5
        mask[::3] = False
    actual = value_and_slopes(*args, mask=None if mask is None else jnp.asarray(mask))
    assert actual[0].shape == (queries, 6)
    check(actual, plain(*args, mask), 2e-6)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_causal_mask(tokens):
    args = inputs(tokens, tokens)
    check(value_and_slopes(*args, causal=True), plain(*args, np.tri(tokens, dtype=bool)), 2e-6)


@pytest.mark.parametrize("tokens", [33, 80])
def test_segments_of_several_blocks(monkeypatch, tokens):
    # as for thousands of tokens: more blocks than segments, and rows left over
    monkeypatch.setattr(xla, "BLOCK", 8)
    monkeypatch.setattr(xla, "SEGMENTS", 2)
    args = inputs(tokens, tokens)
    check(value_and_slopes(*args, causal=True), plain(*args, np.tri(tokens, dtype=bool)), 2e-6)


def test_first_causal_row_is_the_first_value():
    query, key, value, _ = inputs(5, 5)
    np.testing.assert_allclose(attention(query, key, value, causal=True)[0], value[0], atol=1e-7)


def test_two_keys_by_hand():
    # scores 0 and log 3: weights 1/4 and 3/4
    key = jnp.array([[0.0], [np.log(3.0)]], jnp.float32)
    output = attention(jnp.ones((1, 1)), key, jnp.array([[8.0], [4.0]]))
    np.testing.assert_allclose(output, [[5.0]], rtol=1e-6)


@pytest.mark.parametrize("scale", [100.0, 10_000.0])
def test_great_scores_stay_finite(scale):
    args = inputs(65, 65, scale=scale)
    output, slopes = value_and_slopes(*args, causal=True)
    expected = plain(*args, np.tri(65, dtype=bool))
    np.testing.assert_allclose(output, expected[0], atol=2e-3 if scale > 1000 else 5e-5)
    assert all(np.all(np.isfinite(slope)) for slope in slopes)


def test_empty_rows_and_masked_garbage_are_zero_in_value_and_slope():
    args, mask = inputs(6, 5), np.ones((6, 5), bool)
    mask[1] = mask[4] = False
    mask[:, 3] = False
    query, key, value, cotangent = args
    key, value = key.at[3].set(1e30), value.at[3].set(1e30)
    output, slopes = value_and_slopes(query, key, value, cotangent, mask=jnp.asarray(mask))
    assert np.all(np.asarray(output)[[1, 4]] == 0)
    assert np.all(np.asarray(slopes[0])[[1, 4]] == 0)
    assert np.all(np.asarray(slopes[1])[3] == 0)
    assert np.all(np.asarray(slopes[2])[3] == 0)
    check((output, slopes), plain(query, key, value, cotangent, mask), 2e-6)


def test_bfloat16_sums_in_float32():
    args = inputs(130, 130, jnp.bfloat16)
    output, slopes = value_and_slopes(*args, causal=True)
    assert output.dtype == jnp.float32
    assert [slope.dtype for slope in slopes] == [jnp.bfloat16] * 3
    check((output, slopes), plain(*args, np.tri(130, dtype=bool)), 2e-2)


# Memory


def arrays_in(jaxpr):
    """Yield the shape of every array in a jaxpr and in those within it."""
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            if hasattr(variable, "aval"):
                yield getattr(variable.aval, "shape", ())
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from arrays_in(inner)


def largest(function, *args):
    shapes = list(arrays_in(jax.make_jaxpr(function)(*args).jaxpr))
    assert len(shapes) > 20
    return max(int(np.prod(shape)) for shape in shapes)


def slopes_of(function):
    return jax.grad(lambda *args: jnp.sum(function(*args) ** 2), argnums=(0, 1, 2))


@pytest.mark.parametrize("derive", [lambda f: f, slopes_of], ids=["forward", "backward"])
def test_causal_attention_holds_no_square_of_the_length(derive):
    tokens = 512
    args = inputs(tokens, tokens)[:3]
    assert largest(derive(lambda *a: attention(*a, causal=True)), *args) < tokens**2 / 2

    def whole(query, key, value):
        return jax.nn.softmax(query @ key.T, axis=1) @ value

    # the check sees the matrix where there is one, and within a transformation too
    shapes = list(arrays_in(jax.make_jaxpr(derive(jax.jit(whole)))(*args).jaxpr))
    assert (tokens, tokens) in shapes
    heads = [a[None].repeat(2, axis=0) for a in args]
    vmapped = jax.vmap(lambda *a: attention(*a, causal=True))
    assert largest(derive(vmapped), *heads) < tokens**2


def test_compiled_gradient_holds_no_square_of_the_length():
    tokens = 512
    args = inputs(tokens, tokens)[:3]
    compiled = jax.jit(slopes_of(lambda *a: attention(*a, causal=True))).lower(*args).compile()
    assert f"[{tokens},{tokens}]" not in compiled.as_text()


def random_heads(seed):
    """Features [B, H, T, C] of two heads of two sequences."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 2, 7, 4)), jnp.float32)


@pytest.mark.parametrize("implementation", ["auto", "xla", "reference"])
@pytest.mark.parametrize("at_once", [0, 1, 3, 4, 9])
def test_causal_attention(monkeypatch, implementation, at_once):
    if at_once:  # a single CPU, which takes so many of the four heads after another
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        monkeypatch.setattr(kernels, "CPU_SCORES", at_once * 7**2)
    query, key, value = (random_heads(seed) for seed in range(3))
    # Traced anew for each number of heads at once, which jit does not see.
    output = jax.jit(lambda *heads: causal_attention(*heads, implementation))(query, key, value)
    for b, h in np.ndindex(2, 2):
        score = np.asarray(query[b, h] @ key[b, h].T)
        weights = reference.attention_weights(score, np.tri(7, dtype=bool))
        expected = weights @ np.asarray(value[b, h])
        np.testing.assert_allclose(output[b, h], expected, rtol=0, atol=2e-6)
