"""The pure functions of the layer against the float64 loops and against numbers by hand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from compiled import (
    IMPLEMENTATIONS,
    attention_weights,
    bounded,
    circular_mean,
    drift,
    every_implementation,
    inputs,
    kuramoto_coupling,
    normalized_gate,
    order_parameter,
    phase_features,
    phase_score,
    tangent_update,
)

from kuramoto_jax import layer

LENGTHS = (1, 2, 5, 17, 63, 64, 65, 128, 130, 300)


def exactly(args):
    """Widen to float64 the very numbers that the layer is given."""
    return tuple(np.asarray(a).astype(np.float64) for a in args)


def mask_of(kind, tokens):
    """Name a mask, or build a boolean one with empty rows: the first, and about one in four."""
    if kind != "boolean":
        return kind
    rng = np.random.default_rng(tokens)
    table = rng.uniform(size=(tokens, tokens)) < 0.5
    return jnp.asarray(table & (np.arange(tokens) % 4 != 0)[:, None])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attention(implementation, name, table, positions, *args):
    return layer.kuramoto_attention(
        *args,
        positions=positions,
        mask=table if name is None else name,
        implementation=implementation,
    )


def attend(implementation, mask="causal", positions=None):
    """Return the jitted layer as a function of (theta, gate_q, gate_k, tau, omega)."""
    name, table = (mask, None) if isinstance(mask, str) else (None, mask)
    return functools.partial(_attention, implementation, name, table, positions)


def close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


# Numbers by hand


def test_lift_of_two_phases():
    lift = phase_features(jnp.array([0.0, np.pi / 2]))
    close(lift, [1.0, 0.0, 0.0, 1.0], 1e-7)


def test_gate_of_zero_and_log_two():
    # softplus(0) = 0.693147 and softplus(log 2) = log 3 = 1.098612, with mean 0.895880
    close(normalized_gate(jnp.log(jnp.array([1.0, 2.0]))), [0.7737056, 1.2262944], 1e-6)


@every_implementation
@pytest.mark.parametrize(
    ("omega", "mask", "expected"),
    [
        (0.0, "causal", [0.0, -0.26894142]),  # scores 0 and 1: weight 1 / (1 + e) on the first
        (0.0, "full", [0.26894142, -0.26894142]),
        (np.pi / 2, "causal", [0.0, -0.11920292]),  # scores cos(pi) = -1 and 1: 1 / (1 + e^2)
        (np.pi / 2, "full", [0.11920292, -0.11920292]),
        (-np.pi / 2, "causal", [0.0, -0.5]),  # scores cos(0) = 1 and 1
    ],
)
def test_two_tokens_a_quarter_turn_apart(implementation, omega, mask, expected):
    theta, ones = jnp.array([[0.0], [np.pi / 2]], jnp.float32), jnp.ones((2, 1))
    function = attend(implementation, mask=mask)
    update = function(theta, ones, ones, jnp.float32(1), jnp.array([omega], jnp.float32))
    close(update[:, 0], expected, 1e-6)


@every_implementation
def test_two_tokens_with_two_equal_coordinates_scale_by_the_root(implementation):
    # each score is (1 / sqrt 2) (cos + cos): 0 and sqrt 2, so 1 / (1 + e^sqrt 2) = 0.19557032
    theta = jnp.array([[0.0, 0.0], [np.pi / 2, np.pi / 2]], jnp.float32)
    ones = jnp.ones((2, 2))
    update = attend(implementation)(theta, ones, ones, jnp.float32(1), jnp.zeros(2))
    close(update, [[0.0, 0.0], [-0.19557032, -0.19557032]], 1e-6)


def test_score_of_two_tokens_with_gates():
    # 3 * 2 * 0.5 * cos(0.5 - 0.2 + 0.1 * (4 - 1)) = 3 cos 0.6 = 2.47600684
    one = [jnp.array([[x]]) for x in (0.5, 0.2, 2.0, 0.5)]
    where = jnp.array([4]), jnp.array([1])
    score = phase_score(*one, jnp.float32(3), jnp.array([0.1]), *where)
    close(score, [[2.47600684]], 1e-6)


def test_three_tokens_with_uniform_weights():
    theta, weights = jnp.array([[0.0], [0.5], [2.0]]), jnp.full((3, 3), 1 / 3)
    expected = [[0.46290766], [0.17268982], [-0.63559747]]
    close(kuramoto_coupling(weights, theta, theta), expected, 1e-6)
    resultant = circular_mean(weights, theta)
    close(resultant, np.full((3, 1), 0.48714524 + 0.46290766j), 1e-6)
    close(tangent_update(theta, resultant), expected, 1e-6)


@every_implementation
def test_three_tokens_with_no_coupling_strength(implementation):
    # tau = 0 makes the causal weights 1, 1/2 and 1/3
    theta, ones = jnp.array([[0.0], [0.5], [2.0]]), jnp.ones((3, 1))
    update = attend(implementation)(theta, ones, ones, jnp.zeros(()), jnp.zeros(1))
    close(update[:, 0], [0.0, -0.23971277, -0.63559747], 1e-6)


def test_bounds_by_hand():
    x, radius = jnp.array([3.0, -4.0]), jnp.array([0.5, 2.0])
    close(bounded(x, radius), [0.49752738, -1.99865859], 1e-6)
    # rms = sqrt(12.5) = 3.53553391 and tanh(rms) / rms = 0.28236259
    close(bounded(x, radius, "norm"), [0.42354389, -2.25890074], 1e-5)


def test_order_parameter_by_hand():
    theta = jnp.radians(jnp.array([[179.0, 0.0, 0.0], [-179.0, 90.0, 180.0]]))
    mean = order_parameter(theta, axis=0)
    close(mean, [-0.99984770, 0.5 + 0.5j, 0.0], 1e-6)
    close(order_parameter(theta, axis=1)[0], (2 - 0.99984770 + 0.01745241j) / 3, 1e-6)


# Each function against the loops


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 5)])
def test_features_and_gates(shape):
    x = np.random.default_rng(0).normal(0, 3, shape).astype(np.float32)
    close(phase_features(jnp.asarray(x)), reference.phase_features(x), 1e-6)
    gate = normalized_gate(jnp.asarray(x))
    close(gate, reference.normalized_gate(x), 1e-5)
    assert np.all(np.asarray(gate) > 0)
    close(jnp.mean(gate, axis=-1), 1.0, 1e-6)


def test_gate_is_one_for_equal_preactivations_of_any_size():
    x = jnp.broadcast_to(jnp.array([[-200.0], [-80.0], [-30.0], [0.0], [1000.0]]), (5, 4))
    close(normalized_gate(x), 1.0, 1e-5)
    slope = jax.jit(jax.vmap(jax.jacobian(layer.normalized_gate)))(x)
    assert np.all(np.isfinite(slope))
    close(jnp.sum(slope, axis=1), 0.0, 1e-5)


@pytest.mark.parametrize("width", [1, 4])
def test_score_between_unlike_queries_and_keys(width):
    theta_q, gate_q, _, tau, omega = inputs(3, width, 1)
    theta_k, _, gate_k, _, _ = inputs(5, width, 2)
    positions = jnp.array([7, 8, 11]), jnp.array([0, 3, 7, 8, 12])
    args = (theta_q, theta_k, gate_q, gate_k, tau, omega)
    score = phase_score(*args, *positions)
    assert score.shape == (3, 5)
    close(score, reference.phase_score(*exactly(args), *positions), 5e-6)


def test_weights_of_plain_and_masked_rows():
    rng = np.random.default_rng(0)
    score = jnp.asarray(rng.normal(0, 30, (4, 6)), jnp.float32)
    mask = rng.uniform(size=(4, 6)) < 0.6
    mask[2] = False
    close(attention_weights(score), reference.attention_weights(score), 1e-6)
    expected = reference.attention_weights(score, mask)
    weights = attention_weights(score, jnp.asarray(mask))
    close(weights, expected, 1e-6)
    close(np.asarray(weights)[~mask], 0.0, 0.0)


def test_weights_ignore_what_masked_scores_hold():
    score = jnp.array([[1.0, np.nan, 1e30, 2.0], [np.inf, 0.0, 0.0, 0.0]])
    mask = jnp.array([[True, False, False, True], [False, True, True, False]])
    expected = [[0.26894142, 0, 0, 0.73105858], [0, 0.5, 0.5, 0]]
    close(attention_weights(score, mask), expected, 1e-6)


def test_resultant_tangent_and_coupling_between_unlike_tokens():
    theta_q, theta_k = inputs(3, 4, 1)[0], inputs(5, 4, 2)[0]
    weights = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(5), 3), jnp.float32)
    resultant = circular_mean(weights, theta_k)
    expected = reference.circular_mean(weights, theta_k)
    close(resultant, expected, 1e-6)
    update = reference.tangent_update(theta_q, expected)
    close(tangent_update(theta_q, resultant), update, 2e-6)
    close(reference.kuramoto_coupling(weights, theta_q, theta_k), update, 1e-12)
    close(kuramoto_coupling(weights, theta_q, theta_k), update, 2e-6)


@pytest.mark.parametrize("kind", ["coordinate", "norm"])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_bounds(kind, shape, scale):
    rng = np.random.default_rng(0)
    x = (scale * rng.normal(size=shape)).astype(np.float32)
    radius = rng.uniform(0.1, 2.0, 4).astype(np.float32)
    step = np.asarray(bounded(jnp.asarray(x), jnp.asarray(radius), kind))
    np.testing.assert_allclose(step, reference.bounded(x, radius, kind), rtol=1e-5)


@pytest.mark.parametrize("kind", ["coordinate", "norm"])
def test_bounds_are_smooth_through_zero(kind):
    radius = jnp.array([0.5, 1.0, 2.0])
    slopes = jax.jit(jax.jacobian(lambda x, r: bounded(x, r, kind), argnums=(0, 1)))
    for scale in (0.0, 1e-30, 1e-12, 1e-4):
        x = scale * jnp.array([1.0, -2.0, 0.5])
        np.testing.assert_allclose(bounded(x, radius, kind), radius * x, rtol=1e-5)
        by_increment, by_radius = slopes(x, radius)
        close(by_increment, np.diag(radius), 1e-5)
        close(by_radius, np.diag(x), 1e-9)


@pytest.mark.parametrize(("axis", "shape"), [(0, (4,)), (1, (3,)), (-1, (3,))])
def test_order_parameter(axis, shape):
    theta = inputs(3, 4)[0]
    mean = order_parameter(theta, axis=axis)
    assert mean.shape == shape
    lines = np.moveaxis(np.asarray(theta), axis, -1)
    close(mean, [reference.order_parameter(line) for line in lines], 1e-6)


# The layer against the loops


@every_implementation
@pytest.mark.parametrize("mask", ["causal", "full", "boolean"])
def test_layer_in_float64(x64, implementation, mask):
    args, mask = inputs(7, 3), mask_of(mask, 7)
    update = attend(implementation, mask=mask)(*args)
    assert update.dtype == jnp.float64
    close(update, reference.kuramoto_attention(*exactly(args), mask=mask), 1e-12)


@every_implementation
@pytest.mark.parametrize("tokens", [1, 2, 5, 17])
def test_layer_in_float32(implementation, tokens):
    args = inputs(tokens, 3, tokens)
    update = attend(implementation)(*args)
    close(update, reference.kuramoto_attention(*exactly(args)), 1e-5)


@every_implementation
def test_causality_goes_by_index_and_drift_by_position(implementation):
    args, positions = inputs(6, 3), jnp.array([9, 2, 2, 40, 41, 7])
    update = attend(implementation, positions=positions)(*args)
    close(update, reference.kuramoto_attention(*exactly(args), positions=positions), 1e-5)


@every_implementation
@pytest.mark.parametrize("first", [1_000, 100_000, 131_000])
def test_far_windows_keep_their_accuracy(implementation, first):
    args, positions = inputs(9, 4), first + jnp.arange(9)
    expected = reference.kuramoto_attention(*exactly(args), positions=positions)
    close(attend(implementation, positions=positions)(*args), expected, 1e-5)


@pytest.mark.parametrize("first", [0, 4_000, 100_000])
def test_far_scores_keep_their_accuracy(first):
    theta, gate_q, gate_k, tau, omega = inputs(6, 4)
    args, positions = (theta, theta, gate_q, gate_k, tau, omega), first + jnp.arange(6)
    expected = reference.phase_score(*exactly(args), positions, positions)
    close(phase_score(*args, positions, positions), expected, 1e-5)


@every_implementation
@pytest.mark.parametrize("mask", ["causal", "boolean"])
def test_gradients_against_finite_differences(x64, implementation, mask):
    args, mask = inputs(4, 2), mask_of(mask, 4)
    readout = np.random.default_rng(1).normal(size=(4, 2))

    def loss(*args):
        update = layer.kuramoto_attention(*args, mask=mask, implementation=implementation)
        return jnp.sum(jnp.asarray(readout) * update)

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*args)
    step, plain = 1e-5, exactly(args)
    for place, slope in enumerate(slopes):
        for index in np.ndindex(slope.shape):
            values = []
            for sign in (1, -1):
                moved = [np.array(a) for a in plain]
                moved[place][index] += sign * step
                update = reference.kuramoto_attention(*moved, mask=mask)
                values.append(np.sum(readout * update))
            close(slope[index], (values[0] - values[1]) / (2 * step), 1e-8)


# The implementations against one another


@functools.partial(jax.jit, static_argnums=(0, 1))
def _slopes(implementation, name, table, positions, readout, *args):
    def loss(*args):
        update = _attention(implementation, name, table, positions, *args)
        return jnp.sum(readout * update), update

    return jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(*args)


def agree(implementation, tokens, mask, first=0):
    """Compare value and gradient of an implementation with the readable one, in float32.

    The readable one always runs at the greatest length, so that it compiles once: the tokens
    that are too many attend to nothing and are attended to by none.
    """
    *arrays, tau, omega = inputs(tokens, 3, tokens)
    readout = jnp.asarray(np.random.default_rng(2).normal(size=(tokens, 3)), jnp.float32)
    spare = ((0, max(LENGTHS) - tokens), (0, 0))
    table = np.zeros((max(LENGTHS),) * 2, bool)
    table[:tokens, :tokens] = reference.allowed(mask, tokens)
    padded = [jnp.pad(a, spare) for a in (readout, *arrays)]
    where = first + jnp.arange(max(LENGTHS))
    slopes, update = _slopes("reference", None, jnp.asarray(table), where, *padded, tau, omega)

    name, table = (mask, None) if isinstance(mask, str) else (None, mask)
    fast_slopes, fast_update = _slopes(
        implementation, name, table, where[:tokens], readout, *arrays, tau, omega
    )
    close(fast_update, update[:tokens], 1e-5)
    names = ("theta", "gate_q", "gate_k", "tau", "omega")
    for name, slope, fast in zip(names, slopes, fast_slopes, strict=True):
        slope = slope[:tokens] if slope.ndim == 2 else slope
        # the slope of omega carries the position as a factor and so its rounding errors too
        reach = first + tokens if name == "omega" else 0
        atol = 2e-5 * (1.0 + np.abs(slope).max() + reach)
        np.testing.assert_allclose(fast, slope, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_xla_agrees_at_every_length(tokens):
    agree("xla", tokens, "causal")


@pytest.mark.parametrize("mask", ["full", "boolean"])
@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
def test_xla_agrees_for_other_masks(tokens, mask):
    agree("xla", tokens, mask_of(mask, tokens))


@pytest.mark.parametrize("mask", ["causal", "full", "boolean"])
def test_automatic_choice_agrees(mask):
    agree("auto", 17, mask_of(mask, 17))


@pytest.mark.parametrize("implementation", ["xla", "auto"])
def test_implementations_agree_in_a_far_window(implementation):
    agree(implementation, 17, "causal", 100_000)


@every_implementation
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_named_masks_are_the_boolean_ones(implementation, mask):
    args = inputs(5, 3)
    table = jnp.asarray(reference.allowed(mask, 5))
    named = attend(implementation, mask=mask)(*args)
    close(attend(implementation, mask=table)(*args), named, 1e-6)


@every_implementation
def test_batch_and_heads_by_vmap(implementation):
    examples = [[inputs(5, 3, 10 * b + h) for h in range(3)] for b in range(2)]
    stacked = [
        jnp.stack([jnp.stack([head[i] for head in row]) for row in examples]) for i in range(3)
    ]
    tau, omega = jnp.array([0.5, 1.0, 4.0]), jnp.stack([head[4] for head in examples[0]])
    single = attend(implementation)
    over_heads = jax.vmap(single, in_axes=(0, 0, 0, 0, 0))
    update = jax.vmap(over_heads, in_axes=(0, 0, 0, None, None))(*stacked, tau, omega)
    assert update.shape == (2, 3, 5, 3)
    for b in range(2):
        for h in range(3):
            expected = single(*examples[b][h][:3], tau[h], omega[h])
            close(update[b, h], expected, 1e-5)


@every_implementation
def test_masks_by_vmap(implementation):
    args = inputs(5, 3)
    masks = jnp.stack([mask_of("boolean", 5), jnp.tri(5, dtype=bool)])
    update = jax.vmap(
        lambda mask: layer.kuramoto_attention(*args, mask=mask, implementation=implementation)
    )(masks)
    for mask, row in zip(masks, update, strict=True):
        close(row, reference.kuramoto_attention(*exactly(args), mask=mask), 1e-5)


@every_implementation
def test_jit_changes_nothing(implementation):
    args = inputs(5, 3)
    eager = layer.kuramoto_attention(*args, implementation=implementation)
    close(attend(implementation)(*args), eager, 1e-6)


# The drift


@pytest.mark.parametrize("first", [0, 255, 4_095, 65_530, 131_063])
def test_drift_is_exact_modulo_a_turn(first):
    omega = jnp.array([3.0, 2.9999, 1.0, 0.1, 1e-2, 1e-4, 0.0, -0.7], jnp.float32)
    positions = first + jnp.arange(10)
    angle = np.asarray(drift(omega, positions))
    assert angle.shape == (10, 8)
    assert angle.dtype == np.float32
    assert np.abs(angle).max() < 4 * np.pi
    exact = np.outer(np.asarray(positions), np.asarray(omega, np.float64))
    close(np.cos(angle), np.cos(exact), 2e-6)
    close(np.sin(angle), np.sin(exact), 2e-6)


def test_slope_of_the_drift_is_the_position():
    positions = jnp.array([0, 1, 1_000, 131_072])
    slope = jax.jacobian(layer.drift)(jnp.array([0.1, 2.0]), positions)
    for t, position in enumerate(positions):
        close(slope[t], int(position) * np.eye(2), 0.0)


# Half precision


def halved(args):
    """Give the gates in bfloat16, which makes the layer compute in it."""
    theta, gate_q, gate_k, tau, omega = args
    return theta, gate_q.astype(jnp.bfloat16), gate_k.astype(jnp.bfloat16), tau, omega


@every_implementation
@pytest.mark.parametrize("mask", ["causal", "boolean"])
@pytest.mark.parametrize("first", [0, 4_000, 100_000])
def test_bfloat16_is_as_near_as_its_rounding(implementation, mask, first):
    # The unit roundoff is 2^-8. A weighted feature is rounded about three times, which moves
    # scores of size 2.5 by some 2 to 4 roundoffs, weights by as much, and the values by
    # one more; errors add up at random, so 8 roundoffs at worst and 2 on the average.
    args, mask = halved(inputs(33, 8, 3)), mask_of(mask, 33)
    positions = first + jnp.arange(33)
    update = attend(implementation, mask=mask, positions=positions)(*args)
    assert update.dtype == jnp.float32
    error = np.asarray(update) - reference.kuramoto_attention(*exactly(args), positions, mask)
    assert np.abs(error).max() < 8 * 2**-8
    assert np.sqrt(np.mean(error**2)) < 2 * 2**-8
    assert np.abs(error).max() > 1e-5  # the gates do choose the type


@every_implementation
def test_bfloat16_starts_after_the_lift(implementation):
    # near 100 the spacing of bfloat16 is 1/2 rad: phases rounded to it would be lost
    theta, *rest = halved(inputs(33, 8, 3))
    update = attend(implementation)(theta, *rest)
    close(attend(implementation)(theta + 32 * np.pi, *rest), update, 8 * 2**-8)


@every_implementation
def test_bfloat16_gradients(implementation):
    args = inputs(33, 8, 3)

    def loss(*args):
        update = layer.kuramoto_attention(*args, implementation=implementation)
        return jnp.sum(update**2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
    for slope, half, given in zip(
        gradient(*args), gradient(*halved(args)), halved(args), strict=True
    ):
        assert half.dtype == given.dtype
        error = np.asarray(half, np.float64) - np.asarray(slope, np.float64)
        assert np.linalg.norm(error) < 0.05 * np.linalg.norm(slope)


def test_neighbouring_positions_stay_apart_in_bfloat16():
    ones, omega = jnp.ones((1, 2), jnp.bfloat16), jnp.array([1.0, 0.3])
    theta, tau = jnp.array([[0.2, 0.4]]), jnp.float32(1)
    for position in (255, 256, 257, 4_095, 15_962):
        where = jnp.array([position + 1]), jnp.array([position])
        score = phase_score(theta, theta, ones, ones, tau, omega, *where)
        close(score, [[(np.cos(1.0) + np.cos(0.3)) / np.sqrt(2)]], 0.02)


def test_scores_of_bfloat16_gates_are_float32():
    theta, gate_q, gate_k, tau, omega = halved(inputs(5, 3))
    where = jnp.arange(5)
    score = phase_score(theta, theta, gate_q, gate_k, tau, omega, where, where)
    assert score.dtype == jnp.float32


def test_softmax_of_close_large_scores():
    rng = np.random.default_rng(0)
    score = jnp.asarray(50 + 0.1 * rng.integers(0, 500, (4, 1024)), jnp.float32)
    for given in (score, score.astype(jnp.bfloat16)):
        weights = attention_weights(given)
        assert weights.dtype == jnp.float32
        close(jnp.sum(weights, axis=1), 1.0, 1e-3)
        expected = reference.attention_weights(np.asarray(given, np.float64))
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-30)


@every_implementation
def test_softmax_of_the_layer_is_not_done_in_bfloat16(implementation):
    # Gates that bfloat16 holds exactly give scores 32 (a + b) from 48 to 97 in steps of 1/8,
    # which bfloat16 does not hold; a third coordinate with gate 0 reads the weights off.
    rng = np.random.default_rng(0)
    theta = np.zeros((256, 4))
    theta[:, 2] = rng.uniform(-3, 3, 256)
    gate_q, gate_k = np.zeros((2, 256, 4))
    gate_q[:, :2] = 1.0
    gate_k[:, 0] = 1.5 + rng.integers(0, 97, 256) / 64
    gate_k[:, 1] = rng.integers(0, 8, 256) / 256
    phases_and_gates = (jnp.asarray(a, jnp.float32) for a in (theta, gate_q, gate_k))
    args = halved((*phases_and_gates, jnp.float32(64), jnp.zeros(4)))
    function = attend(implementation, mask="full")
    expected = reference.kuramoto_attention(*exactly(args), mask="full")
    close(function(*args), expected, 3 * 2**-8)

    program = str(jax.make_jaxpr(function)(*args))
    results = re.findall(r"(\w+)\[[^\]]*\] = exp2?\b", program)
    assert results
    assert set(results) == {"f32"}


# Shapes, types and errors


def test_shapes_and_types():
    theta, gate_q, gate_k, tau, omega = inputs(5, 3)
    theta_q, gate_q, where = theta[:2], gate_q[:2], jnp.arange(5)
    pair = (theta_q, theta, gate_q, gate_k, tau, omega, where[:2], where)
    weights, resultant = jnp.ones((2, 5)), jnp.ones((2, 3), jnp.complex64)
    calls = [
        (layer.phase_features, (theta,), (5, 6), jnp.float32),
        (layer.normalized_gate, (theta,), (5, 3), jnp.float32),
        (layer.phase_score, pair, (2, 5), jnp.float32),
        (layer.attention_weights, (weights, jnp.ones((2, 5), bool)), (2, 5), jnp.float32),
        (layer.circular_mean, (weights, theta), (2, 3), jnp.complex64),
        (layer.tangent_update, (theta_q, resultant), (2, 3), jnp.float32),
        (layer.kuramoto_coupling, (weights, theta_q, theta), (2, 3), jnp.float32),
        (layer.bounded, (theta, omega), (5, 3), jnp.float32),
        (lambda theta: order_parameter(theta, axis=0), (theta,), (3,), jnp.complex64),
        (layer.drift, (omega, where), (5, 3), jnp.float32),
    ]
    for function, args, shape, dtype in calls:
        result = jax.eval_shape(function, *args)
        assert (result.shape, result.dtype) == (shape, dtype), function


def test_types_in_float64(x64):
    theta, gate_q, gate_k, tau, omega = inputs(3, 2)
    square, where = jnp.ones((3, 3)), jnp.arange(3)
    pair = (theta, theta, gate_q, gate_k, tau, omega, where, where)
    calls = [
        (layer.phase_score, pair, jnp.float64),
        (layer.attention_weights, (square,), jnp.float64),
        (layer.circular_mean, (square, theta), jnp.complex128),
        (lambda theta: order_parameter(theta, axis=0), (theta,), jnp.complex128),
        (layer.drift, (omega, where), jnp.float64),
    ]
    for function, args, dtype in calls:
        assert jax.eval_shape(function, *args).dtype == dtype, function


@every_implementation
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_update_has_the_type_of_the_phases(x64, implementation, compute):
    for phase in (jnp.float32, jnp.float64):
        theta, gate_q, gate_k, tau, omega = (a.astype(phase) for a in inputs(5, 3))
        gates = gate_q.astype(compute), gate_k.astype(compute)
        update = jax.eval_shape(attend(implementation), theta, *gates, tau, omega)
        assert update.shape == (5, 3)
        assert update.dtype == phase


def test_normalized_gate_of_bfloat16():
    gate = normalized_gate(jnp.asarray([[-3.0, 0.0, 1.0, 5.0]], jnp.bfloat16))
    expected = reference.normalized_gate([[-3.0, 0.0, 1.0, 5.0]])
    np.testing.assert_allclose(np.asarray(gate, np.float64), expected, rtol=2**-6)


def test_unknown_choices_are_named_with_the_valid_ones():
    args = inputs(3, 2)
    with pytest.raises(ValueError, match="nonsense") as error:
        layer.kuramoto_attention(*args, implementation="nonsense")
    for name in (*IMPLEMENTATIONS, "auto"):
        assert name in str(error.value)
    with pytest.raises(ValueError, match="sideways") as error:
        layer.kuramoto_attention(*args, mask="sideways")
    for name in ("causal", "full"):
        assert name in str(error.value)
    with pytest.raises(ValueError, match="loosely") as error:
        layer.bounded(args[0], args[4], "loosely")
    for name in ("coordinate", "norm"):
        assert name in str(error.value)
