"""Sine and cosine together, against float64, and the constants their range reduction is made of."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kuramoto_jax.kernels.cody_waite import leading_parts
from kuramoto_jax.kernels.sincos import LIMIT, sincos

pair = jax.jit(sincos)
native = jax.jit(lambda x: (jnp.sin(x), jnp.cos(x)))
TINY = np.float32([0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e-8, 1e-4])


def exact(x):
    return np.sin(np.float64(x)), np.cos(np.float64(x))


def close(actual, expected, tolerance=1.1e-7):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def neighbours(x, reach=3):
    """The float32 numbers next to each of x, to both sides."""
    bits = np.float32(x).view(np.int32)
    return np.concatenate([(bits + step).view(np.float32) for step in range(-reach, reach + 1)])


RANGES = {
    "one turn": np.linspace(-np.pi, np.pi, 200_001),
    "ten": np.linspace(-10, 10, 200_003),
    "all": np.linspace(-9999.9, 9999.9, 500_003),
    "quarters": np.concatenate(
        [neighbours(sign * np.arange(1, 6366) * np.pi / 2) for sign in (1, -1)]
    ),
    "eighths": neighbours((np.arange(6366) + 0.5) * np.pi / 2),
    "last": neighbours([9999.999], 50)[:50],
    "tiny": np.concatenate([TINY, -TINY]),
}


@pytest.mark.parametrize("name", RANGES)
def test_accuracy_within_the_limit(name):
    x = RANGES[name].astype(np.float32)
    assert np.abs(x).max() < LIMIT
    close(pair(x), exact(x))


@pytest.mark.parametrize("name", RANGES)
def test_two_units_in_the_last_place(name):
    x = RANGES[name].astype(np.float32)
    for actual, expected in zip(pair(x), exact(x), strict=True):
        unit = np.spacing(np.abs(expected).astype(np.float32))
        unit = np.maximum(unit, np.finfo(np.float32).tiny)  # XLA takes subnormal numbers for zero
        assert np.all(np.abs(actual - expected) <= 2 * unit)


def test_whole_quarter_turns():
    sin, cos = pair(np.float32(np.arange(-8, 9) * np.pi / 2))
    close((sin[::2], cos[1::2]), (np.zeros(9), np.zeros(8)), 2e-6)
    close((sin[1::2], cos[::2]), ([1, -1] * 4, [1, -1] * 4 + [1]))


@pytest.mark.parametrize("x", [1e4, 12345.678, -5e4, 1e6, -1e10, 3e38])
def test_beyond_the_limit_the_platform_answers(x):
    for values in ([x], [x, 0.5, -2.0]):
        values = jnp.asarray(values, jnp.float32)
        close(pair(values), exact(values))
        close(pair(values), native(values), 0)


@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan])
def test_not_finite_gives_nan_and_leaves_the_others(x):
    values = jnp.asarray([0.5, x, -2.0], jnp.float32)
    for one, other in zip(pair(values), native(values), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isnan(one[1])
        assert np.all(np.isfinite(np.delete(one, 1)))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3), (2, 1, 3)])
def test_shapes(shape):
    x = np.random.default_rng(0).normal(0, 5, shape).astype(np.float32)
    result = pair(jnp.asarray(x))
    assert [part.shape for part in result] == [shape, shape]
    assert [part.dtype for part in result] == [jnp.float32, jnp.float32]
    close(result, exact(x))
    close(sincos(jnp.asarray(x)), exact(x))


def test_float64_is_the_platforms_own(x64):
    x = jnp.linspace(-1e5, 1e5, 1001)
    assert x.dtype == jnp.float64
    close(pair(x), exact(x), 1e-15)


def test_bfloat16_keeps_its_type():
    x = jnp.asarray([0.5, 3.0], jnp.bfloat16)
    result = pair(x)
    assert [part.dtype for part in result] == [jnp.bfloat16] * 2
    close([part.astype(jnp.float32) for part in result], exact([0.5, 3.0]), 4e-3)


SAMPLES = np.random.default_rng(1).normal(0, 20, (3, 4, 5)).astype(np.float32)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("far", [False, True])
def test_under_vmap(depth, far):
    x = SAMPLES.copy()
    if far:
        x[1, 2, 3] = 3e6
    function = sincos
    for _ in range(depth):
        function = jax.vmap(function)
    close(function(jnp.asarray(x)), exact(x))
    close(jax.vmap(sincos, in_axes=1, out_axes=1)(jnp.asarray(x)), exact(x))


def test_a_batch_still_takes_one_branch():
    # a batched condition would become a selection between two results, both of them computed
    text = jax.jit(jax.vmap(jax.vmap(sincos))).lower(SAMPLES).as_text()
    assert "stablehlo.case" in text
    assert "tensor<i1>" in text


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_derivatives(scale):
    x = jnp.asarray(scale * SAMPLES)
    direction = jnp.asarray(SAMPLES[::-1].copy())
    sin, cos = exact(x)
    values, slopes = jax.jit(lambda x, d: jax.jvp(sincos, (x,), (d,)))(x, direction)
    close(values, (sin, cos))
    close(slopes, (cos * direction, -sin * direction), 1e-5)

    sums = [lambda x, i=i: jnp.sum(sincos(x)[i]) for i in range(2)]
    close([jax.jit(jax.grad(f))(x) for f in sums], (cos, -sin))
    slope = jax.vmap(jax.grad(lambda x: sincos(x)[0] + 2 * sincos(x)[1]))(x.ravel())
    close([slope], [(cos - 2 * sin).ravel()], 4e-7)
    second = jax.vmap(jax.grad(jax.grad(lambda x: sincos(x)[0])))(x.ravel())
    close([second], [-sin.ravel()])


# The constants


def significant_bits(x):
    numerator = abs(Fraction(x).numerator)
    return numerator.bit_length() - (numerator & -numerator).bit_length() + 1 if numerator else 0


CUTS = [
    (math.pi / 2, 11, 5),
    (2 * math.pi, 8, 3),
    (1 / 3, 4, 2),
    (0.1, 12, 1),
    (1000 / 7, 10, 4),
]


@pytest.mark.parametrize(("x", "bits", "parts"), CUTS)
def test_parts_are_short_and_sum_to_the_constant(x, bits, parts):
    found = leading_parts(x, bits, parts)
    assert len(found) == parts
    assert sum(map(Fraction, found)) == Fraction(x)
    assert all(significant_bits(part) <= bits for part in found[:-1])
    rest = Fraction(x)
    for part in found[:-1]:
        # what is left is below the last bit of the part, and so the parts are the leading ones
        assert 0 <= rest - Fraction(part) < rest / 2 ** (bits - 1)
        rest -= Fraction(part)


def test_parts_by_hand():
    # 0.8125 = 0.1101 in binary: 0.11, then 0.0001
    assert leading_parts(0.8125, bits=2, parts=2) == (0.75, 0.0625)
    assert leading_parts(0.8125, bits=1, parts=3) == (0.5, 0.25, 0.0625)


def test_products_with_whole_numbers_are_exact_in_float32():
    for part in leading_parts(math.pi / 2, 11, 5)[:-1]:
        for turns in (8191, 8190, 6367, 4097, 1):
            product = np.float32(turns) * np.float32(part)
            assert Fraction(float(product)) == turns * Fraction(part)
