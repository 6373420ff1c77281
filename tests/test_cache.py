"""The decode cache against recomputation: any chunks, any prompts, and a window that rolls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_baselines
import test_modules
from test_model import QUICK, both, logits, parameters, text

from kuramoto_jax.baselines import build
from kuramoto_jax.cache import cached_attention, chunk_positions, empty_cache
from kuramoto_jax.config import ModelConfig

LENGTH = 65


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _decode(model, params, tokens, cache):
    return model.apply({"params": params}, tokens, cache, method="decode")


def decode(config, tokens, chunk, slots, first=0):
    """Return the logits of a text read in chunks, and the cache at its end."""
    model, found = build(config), []
    cache = model.init_cache(len(tokens), slots)
    cache = cache.replace(position=cache.position + first)
    for start in range(0, tokens.shape[1], chunk):
        part = jnp.asarray(tokens[:, start : start + chunk])
        part, cache = _decode(model, parameters(config), part, cache)
        found.append(np.asarray(part))
    return np.concatenate(found, axis=1), cache


def close(actual, expected, tolerance=1e-4):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def logits_in_numpy(config, tokens, window):
    """Logits of one text from scratch, each token seeing the last `window` in every layer."""
    params, length = parameters(config), len(tokens)
    lag = np.arange(length)[:, None] - np.arange(length)[None, :]
    mask = (lag >= 0) & (lag < window)
    kuramoto = config.name == "kuramoto"
    oracle = test_modules if kuramoto else test_baselines
    table = np.asarray(params["embed"]["phases" if kuramoto else "embedding"])
    state = table[tokens]
    for layer in range(config.layers):
        block = jax.tree.map(lambda p, layer=layer: p[layer], params["blocks"])
        state = oracle.block_in_numpy(config, block, state, mask)
    if kuramoto:
        return oracle.readout_in_numpy(params["readout"], state, table)
    return oracle.readout_in_numpy(params, state)


@both
@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65])
def test_cached_logits_are_the_recomputed_ones(config, chunk):
    tokens = text(2, LENGTH)
    found, cache = decode(config, tokens, chunk, LENGTH)
    close(found, logits(config, tokens))
    assert cache.position == LENGTH


@both
@pytest.mark.parametrize("chunk", [1, 2])
def test_a_rolling_cache_is_a_window_mask(config, chunk):
    tokens, slots = text(2, 11), 4
    found = decode(config, tokens, chunk, slots)[0][0]
    close(found, logits_in_numpy(config, tokens[0], slots))
    # the window is felt, and is not one token longer or shorter
    for other in (slots - 1, slots + 1):
        assert np.abs(found - logits_in_numpy(config, tokens[0], other)).max() > 1e-2


@both
def test_a_text_forgets_what_lies_beyond_its_window(config):
    # with 2 layers of 4 slots a token hears of 2 * 3 before it
    tokens = text(2, 12)
    other = tokens.copy()
    other[:, :4] += 1
    one, two = (decode(config, t % 256, 1, 4)[0] for t in (tokens, other))
    change = np.abs(one - two).max(axis=-1)
    assert np.all(change[:, :10] > 1e-5)
    np.testing.assert_array_equal(change[:, 10:], 0)


@both
@pytest.mark.parametrize("first", [1, 6, 1003, 100_000])
def test_only_position_differences_count(config, first):
    # a text that begins late enough has forgotten the empty slots it found before it
    tokens = text(2, 12)
    found, expected = (decode(config, tokens, 1, 4, start)[0] for start in (first, 0))
    close(found[:, 6:], expected[:, 6:])


@both
def test_a_batch_of_prompts_is_its_prompts(config):
    tokens = text(2, 5)
    together = decode(config, tokens, 1, 4)[0]
    for row in range(2):
        alone = decode(config, tokens[row : row + 1], 1, 4)[0]
        close(together[row], alone[0], 1e-5)


@both
def test_a_chunk_longer_than_the_cache_is_refused(config):
    model = build(config)
    with pytest.raises(ValueError, match=r"chunk of 5 tokens: must be at most the 4 slots"):
        jax.eval_shape(
            lambda tokens: model.apply(
                {"params": parameters(config)}, tokens, model.init_cache(1, 4), method="decode"
            ),
            jax.ShapeDtypeStruct((1, 5), jnp.int32),
        )


@both
def test_a_cache_can_be_used_twice(config):
    tokens = text(2, 5)
    _, cache = decode(config, tokens[:, :4], 1, 4)
    again = [
        _decode(build(config), parameters(config), jnp.asarray(tokens[:, 4:]), cache)[0]
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*again)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_cache(dtype):
    config = ModelConfig(layers=3, width=12, heads=2, dtype=dtype)
    cache = build(config).init_cache(5, 7)
    assert cache.key.shape == cache.value.shape == (3, 5, 2, 7, 12)
    config = ModelConfig(name="transformer", layers=3, width=12, heads=2, dtype=dtype)
    cache = build(config).init_cache(5, 7)
    assert cache.key.shape == cache.value.shape == (3, 5, 2, 7, 6)
    assert cache.key.dtype == cache.value.dtype == jnp.dtype(dtype)
    assert cache.position == 0


def test_each_token_lies_in_the_slot_of_its_position():
    attend = jax.jit(cached_attention, compiler_options=QUICK)
    empty = empty_cache(1, 1, 1, 3, 1, 1, "float32")
    held, outputs = (empty.key[0], empty.value[0]), []
    for position in range(5):
        # equal keys: the output is the mean value of the tokens in the window
        key, value = jnp.ones((1, 1, 1, 1)), jnp.full((1, 1, 1, 1), 10.0 * 2**position)
        output, held = attend(key, key, value, held, jnp.int32(position))
        outputs.append(float(output[0, 0, 0, 0]))
    close(outputs, [10, 15, 70 / 3, 140 / 3, 280 / 3])
    close(held[1][0, 0, :, 0], [80, 160, 40], 0)
    close(chunk_positions(5, 3), [5, 6, 7], 0)
