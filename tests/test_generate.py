"""Sampling: greedy chains, seeds, filters against hand-computed distributions, and safe text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cache import logits_in_numpy
from test_model import CONFIGS, QUICK, logits, parameters, text

from kuramoto_jax.baselines import build
from kuramoto_jax.generate import Sampling, as_text, filter_logits, generate, prefill, stream

LENGTH, SLOTS = 8, 16
PROMPTS = text(2, 4, seed=5)


@functools.cache
def sample(name, seed=0, temperature=1.0, top_k=0, top_p=1.0):
    """Continue the prompts; asked for again, the answer is the one given before."""
    return draw(name, seed, temperature, top_k, top_p)


def draw(name, seed=0, temperature=1.0, top_k=0, top_p=1.0):
    sampling = Sampling(temperature, top_k, top_p)
    function = compiled(name, length=LENGTH, slots=SLOTS, sampling=sampling)
    key = jax.random.key(seed)
    return np.asarray(function(parameters(CONFIGS[name]), jnp.asarray(PROMPTS), key))


@functools.cache
def compiled(name, **fields):
    """`generate` of a model, compiled fast, to run slowly."""
    function = functools.partial(generate, build(CONFIGS[name]), **fields)
    return jax.jit(function, compiler_options=QUICK)


@functools.cache
def greedy(name):
    """The chain of most likely bytes, each from the whole text before it."""
    tokens = PROMPTS
    for _ in range(LENGTH):
        padded = np.pad(tokens, ((0, 0), (0, SLOTS - tokens.shape[1])))
        best = logits(CONFIGS[name], padded)[:, tokens.shape[1] - 1].argmax(axis=-1)
        tokens = np.concatenate([tokens, best[:, None].astype(np.int32)], axis=1)
    return tokens[:, PROMPTS.shape[1] :]


every_model = pytest.mark.parametrize("name", CONFIGS)


@every_model
def test_no_temperature_takes_the_most_likely_byte_whatever_the_seed(name):
    for seed in (0, 1):
        np.testing.assert_array_equal(sample(name, seed, temperature=0.0), greedy(name))


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_filters_that_leave_one_byte_are_greedy(fields):
    for seed in (0, 1):
        np.testing.assert_array_equal(sample("transformer", seed, **fields), greedy("transformer"))


def test_the_seed_decides_the_text():
    name = "transformer"
    one, other = sample(name, 0), sample(name, 1)
    assert one.shape == (2, LENGTH)
    assert one.dtype == np.int32
    assert np.all((one >= 0) & (one < 256))
    assert np.any(one != other)
    assert np.any(one[0] != one[1])
    np.testing.assert_array_equal(draw(name, 0), one)  # not touched by the calls in between


def test_a_longer_text_than_the_window():
    function = compiled("transformer", length=20, slots=5, sampling=Sampling(0.0))
    params, key = parameters(CONFIGS["transformer"]), jax.random.key(0)
    found = np.asarray(function(params, jnp.asarray(PROMPTS), key))
    text = np.concatenate([PROMPTS, found], axis=1)
    # the last byte is the one that the window before it makes most likely
    for row in text:
        best = logits_in_numpy(CONFIGS["transformer"], row[:-1], 5)[-1].argmax()
        assert row[-1] == best


# Filters


PROBABILITY = np.array([0.125, 0.5, 0.0625, 0.25, 0.0625])
filtered = jax.jit(filter_logits, static_argnames=("temperature", "top_k", "top_p"))


def distribution(probability=PROBABILITY, **fields):
    found = filtered(jnp.log(jnp.asarray(probability, jnp.float32)), **fields)
    assert found.dtype == jnp.float32
    return np.asarray(jax.nn.softmax(found, axis=-1))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, PROBABILITY),
        ({"top_k": 0}, PROBABILITY),
        ({"top_k": 5}, PROBABILITY),
        ({"top_k": 99}, PROBABILITY),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3, 0]),
        ({"top_k": 3}, [1 / 7, 4 / 7, 0, 2 / 7, 0]),
        ({"top_p": 1.0}, PROBABILITY),
        ({"top_p": 0.0}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.45}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.55}, [0, 2 / 3, 0, 1 / 3, 0]),
        ({"top_p": 0.7}, [0, 2 / 3, 0, 1 / 3, 0]),
        ({"top_p": 0.8}, [1 / 7, 4 / 7, 0, 2 / 7, 0]),
        ({"top_p": 0.999}, PROBABILITY),
        ({"temperature": 0.5}, PROBABILITY**2 / np.sum(PROBABILITY**2)),
        ({"temperature": 2.0}, PROBABILITY**0.5 / np.sum(PROBABILITY**0.5)),
        ({"temperature": 1e-3}, [0, 1, 0, 0, 0]),
        # squared: 16, 4, 1 in 21.5, of which the first is 0.744
        ({"temperature": 0.5, "top_p": 0.74}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.75}, [0, 0.8, 0, 0.2, 0]),
        ({"temperature": 0.5, "top_k": 2}, [0, 0.8, 0, 0.2, 0]),
        # of the two left the first has 2/3
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [0, 2 / 3, 0, 1 / 3, 0]),
    ],
    ids=str,
)
def test_filters_by_hand(fields, expected):
    np.testing.assert_allclose(distribution(**fields), expected, atol=1e-6)


def test_filters_act_on_each_row_alone():
    rows = np.stack([PROBABILITY, PROBABILITY[::-1]])[:, None]
    found = distribution(rows, top_k=3, top_p=0.7)
    np.testing.assert_allclose(found[0, 0], distribution(top_k=3, top_p=0.7), atol=1e-6)
    np.testing.assert_allclose(found[1, 0], found[0, 0][::-1], atol=1e-6)


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}])
def test_equally_likely_symbols_are_cut_to_the_number_asked_for(fields):
    assert np.count_nonzero(distribution(np.full(4, 0.25), **fields)) == 2


def test_draws_follow_the_filtered_distribution():
    keys = jax.random.split(jax.random.key(0), 4000)
    row = filtered(jnp.log(jnp.asarray(PROBABILITY, jnp.float32)), top_k=2)
    drawn = np.asarray(jax.vmap(lambda key: jax.random.categorical(key, row))(keys))
    share = np.bincount(drawn, minlength=5) / len(keys)
    np.testing.assert_allclose(share, [0, 2 / 3, 0, 1 / 3, 0], atol=0.03)


# Text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"", ""),
        (b"plain text\n\twith lines", "plain text\n\twith lines"),
        ("Žluťoučký kůň – 同期 🙂".encode(), "Žluťoučký kůň – 同期 🙂"),
        (b"\xff", r"\xff"),
        (b"a\xc3", r"a\xc3"),  # a character cut off at the end
        (b"\xa9b", r"\xa9b"),  # and at the beginning
        (b"\xe5\x90a", r"\xe5\x90a"),
        (b"\xed\xa0\x80", r"\xed\xa0\x80"),  # half a surrogate pair
        (b"\x00", r"\x00"),
        (b"\x1b[31mred", r"\x1b[31mred"),
        (b"\r\n", "\\r\n"),
        (b"\x7f\x08", r"\x7f\x08"),
        ("\x9b\u2028\u202e\ufeff".encode(), r"\x9b\u2028\u202e\ufeff"),
    ],
)
def test_text_is_safe_to_show(raw, shown):
    assert as_text(np.frombuffer(raw, np.uint8).astype(np.int32)) == shown


def test_no_bytes_can_steer_a_terminal():
    rng = np.random.default_rng(0)
    for tokens in [np.arange(256), *rng.integers(0, 256, (200, 50))]:
        shown = as_text(tokens)
        assert all(c.isprintable() or c in "\n\t" for c in shown)
        shown.encode("utf-8")


@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_a_stream_is_the_text_that_generate_gives(length):
    name = next(iter(CONFIGS))
    model, params, key = build(CONFIGS[name]), parameters(CONFIGS[name]), jax.random.key(3)
    fields = {"length": length, "slots": SLOTS, "sampling": Sampling(top_p=0.9)}
    pieces = list(stream(model, params, jnp.asarray(PROMPTS), key, **fields))
    assert all(piece.shape[1] <= 16 for piece in pieces)
    whole = generate(model, params, jnp.asarray(PROMPTS), key, **fields)
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 40])
def test_a_prompt_longer_than_the_cache_slides_through_it(length):
    config = next(iter(CONFIGS.values()))
    model, params = build(config), parameters(config)
    prompt = jnp.asarray(text(2, length, seed=7))
    cache = model.init_cache(2, SLOTS)
    for column in range(length):
        token = prompt[:, column : column + 1]
        expected, cache = model.apply({"params": params}, token, cache, method="decode")
    logits, after = prefill(model, params, prompt, SLOTS)
    np.testing.assert_allclose(logits, expected[:, 0], atol=1e-4)
    assert int(after.position) == length


def test_an_empty_prompt_is_refused():
    config = next(iter(CONFIGS.values()))
    with pytest.raises(ValueError, match="prompt"):
        prefill(build(config), parameters(config), jnp.zeros((1, 0), jnp.int32), SLOTS)


def test_min_p_keeps_what_is_likely_enough():
    logits = jnp.log(jnp.asarray([0.5, 0.26, 0.2, 0.04]))
    kept = np.isfinite(filter_logits(logits, min_p=0.45))
    np.testing.assert_array_equal(kept, [True, True, False, False])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"min_p": -0.1},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"^{name}="):
        Sampling(**fields)
