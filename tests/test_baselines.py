"""The transformer against float64 loops, and the bigram model by hand."""

import functools
import math
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from kuramoto_jax.baselines import TransformerBlock, bigram_bpc, build, rotary
from kuramoto_jax.config import ModelConfig
from kuramoto_jax.modules import position_rates

QUICK = {"xla_backend_optimization_level": 0}  # compile fast, run slowly
SMALL = ModelConfig(name="transformer", symbols=11, layers=1, width=8, heads=2, hidden=5)


def randomized(module, *args):
    """Parameters far from the initial ones, of the shapes the module declares."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(module.init, jax.random.key(0), *args)["params"]
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(0.3, 0.5, p.shape), p.dtype), shapes)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def apply(module, params, *args):
    return module.apply({"params": params}, *args)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(actual, expected, tolerance=1e-5):
    atol = tolerance * (1 + np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# The transformer in NumPy


def block_in_numpy(config, params, x, mask="causal"):
    """One layer: x += W_o attention(norm x), then x += SwiGLU(norm x), of one sequence [T, D]."""
    params = jax.tree.map(lambda p: np.asarray(p).astype(np.float64), params)
    x = np.asarray(x, np.float64)
    y = reference.rms_norm(x, params["attention_norm"]["scale"])
    heads, width = config.heads, config.head_width
    query, key, value = (
        (y @ params[name]["kernel"]).reshape(len(x), heads, width)
        for name in ("query", "key", "value")
    )
    rates = [config.rate_base ** (-p / (width // 2)) for p in range(width // 2)]
    mixed = [
        reference.rope_attention(query[:, h], key[:, h], value[:, h], rates, mask)
        for h in range(heads)
    ]
    x = x + np.concatenate(mixed, axis=1) @ params["output"]["kernel"]
    y = reference.rms_norm(x, params["feedforward_norm"]["scale"])
    weights = (params[name]["kernel"] for name in ("gate", "up", "down"))
    return x + reference.swiglu(y, *weights)


def readout_in_numpy(params, x):
    """Norm, then tied logits scaled by 1 / sqrt(D)."""
    table = np.asarray(params["embed"]["embedding"]).astype(np.float64)
    y = reference.rms_norm(x, np.asarray(params["norm"]["scale"]).astype(np.float64))
    return y @ table.T / math.sqrt(x.shape[1])


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_block(implementation):
    config = ModelConfig(
        name="transformer", layers=1, width=8, heads=2, hidden=5, implementation=implementation
    )
    x = normal(2, 6, 8)
    params = randomized(TransformerBlock(config), x)
    after, cache = apply(TransformerBlock(config), params, x)
    assert cache is None
    for row, x_row in zip(after, x, strict=True):
        close(row, block_in_numpy(config, params, x_row))


def test_model():
    tokens = jnp.array([[3, 0, 10, 10, 1], [1, 2, 3, 4, 5]])
    params = randomized(build(SMALL), tokens)
    logits = apply(build(SMALL), params, tokens)
    blocks = jax.tree.map(lambda p: p[0], params["blocks"])
    for row, row_tokens in zip(logits, tokens, strict=True):
        x = np.asarray(params["embed"]["embedding"])[np.asarray(row_tokens)]
        close(row, readout_in_numpy(params, block_in_numpy(SMALL, blocks, x)))


def test_stream_stays_float32_in_bfloat16():
    narrow = ModelConfig(name="transformer", layers=1, width=8, heads=2, hidden=5, dtype="bfloat16")
    x = normal(1, 4, 8) + 1000.0
    params = randomized(TransformerBlock(narrow), x)
    for name in ("output", "down"):
        params[name]["kernel"] = jnp.zeros_like(params[name]["kernel"])
    close(apply(TransformerBlock(narrow), params, x)[0], x, 0)


# Rotary position


def test_rotary_is_multiplication_by_a_phasor():
    x, angle = normal(2, 5, 6), 3 * normal(5, 3, seed=1)
    turned = np.asarray(jax.jit(rotary)(x, angle)).astype(np.float64)
    before, after = (np.asarray(a[..., :3]) + 1j * np.asarray(a[..., 3:]) for a in (x, turned))
    close(after, before * np.exp(1j * np.asarray(angle)), 1e-6)


def test_rotary_by_hand():
    x = jnp.array([[1.0, 0.0, 0.0, 2.0]])  # 1 and 2i, by a quarter and by half a turn
    close(rotary(x, jnp.array([[np.pi / 2, np.pi]], jnp.float32)), [[0, 0, 1, -2]], 1e-6)


def test_rotary_keeps_the_type():
    x = normal(3, 4)
    result = rotary(x.astype(jnp.bfloat16), normal(3, 2))
    assert result.dtype == jnp.bfloat16
    close(result.astype(jnp.float32), rotary(x, normal(3, 2)), 0.02)


def test_products_of_rotated_features_know_position_differences_alone():
    rates = jnp.asarray(position_rates(ModelConfig(), 3), jnp.float32)
    query, key = normal(1, 6), normal(1, 6, seed=1)

    def score(t, u):
        turned = [rotary(x, t * rates[None, :]) for x, t in ((query, t), (key, u))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7.0, 3.0) == pytest.approx(score(104.0, 100.0), abs=2e-5)
    assert abs(score(7.0, 3.0) - score(7.0, 4.0)) > 0.01


# Bigrams


def as_bytes(string):
    return np.frombuffer(string.encode(), np.uint8)


def test_bigrams_by_hand():
    # aabab: aa 1, ab 2, ba 1. P(a) = (3 + 1) / 261, P(b) = (2 + 1) / 261, P(c) = 1 / 261
    a, b, c = 4 / 261, 3 / 261, 1 / 261
    cost = {
        "aa": (1 + 4 * a) / (3 + 4),
        "ab": (2 + 4 * b) / (3 + 4),
        "ba": (1 + 4 * a) / (1 + 4),
        "bb": 4 * b / (1 + 4),
        "ac": 4 * c / (3 + 4),
        "ca": a,  # nothing seen after c: the byte frequencies
    }
    train = as_bytes("aabab")
    for pair, probability in cost.items():
        assert bigram_bpc(train, as_bytes(pair)) == pytest.approx(-math.log2(probability))
    bits = -sum(math.log2(cost[pair]) for pair in ("ab", "bb", "ba", "ac")) / 4
    assert bigram_bpc(train, as_bytes("abbac")) == pytest.approx(bits)


@pytest.mark.parametrize("first", [0, 97, 255])
def test_probabilities_of_the_next_byte_sum_to_one(first):
    train = as_bytes("the cat sat on the mat")
    pairs = [np.array([first, b], np.uint8) for b in range(256)]
    total = sum(2 ** -bigram_bpc(train, pair) for pair in pairs)
    assert total == pytest.approx(1)


def test_a_text_never_seen_costs_eight_bits_at_most_nearly():
    assert bigram_bpc(np.zeros(1, np.uint8), np.array([5, 6, 7], np.uint8)) == pytest.approx(
        math.log2(257)
    )


def test_bigrams_beat_the_frequencies_of_bytes_on_english():
    text = as_bytes("\n".join(topics[name] for name in sorted(topics)))
    train, heldout = np.split(text, [len(text) * 9 // 10])
    share = np.bincount(heldout) / len(heldout)
    entropy = -sum(p * math.log2(p) for p in share if p)
    assert 2.5 < bigram_bpc(train, heldout) < entropy - 0.5
