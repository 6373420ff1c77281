"""The statements of the paper as laws of the layer, and the hard corners of its gradient."""

import functools
import itertools

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
    every_implementation,
    inputs,
    kuramoto_coupling,
    normalized_gate,
    order_parameter,
    phase_features,
    phase_score,
    random_weights,
    tangent_update,
)
from scipy import optimize

from kuramoto_jax import layer


def score_of(theta, gate_q, gate_k, tau, omega, positions):
    return phase_score(theta, theta, gate_q, gate_k, tau, omega, positions, positions)


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


# Proposition 1, Proposition 2, Lemma 3, Remark 1


@pytest.mark.parametrize(("rows", "cols", "seed"), [(1, 1, 0), (4, 4, 1), (3, 7, 2)])
def test_tangent_component_is_a_kuramoto_coupling(x64, rows, cols, seed):
    theta_q, theta_k = inputs(rows, 5, seed)[0], inputs(cols, 5, seed + 10)[0]
    weights = random_weights(rows, cols, seed)
    update = tangent_update(theta_q, circular_mean(weights, theta_k))
    close(update, kuramoto_coupling(weights, theta_q, theta_k), 1e-14)


@every_implementation
def test_layer_is_a_kuramoto_coupling_with_its_own_weights(x64, implementation):
    args = inputs(6, 3)
    score = score_of(*args, jnp.arange(6))
    weights = attention_weights(score, jnp.tri(6, dtype=bool))
    expected = kuramoto_coupling(weights, args[0], args[0])
    close(attend(implementation)(*args), expected, 1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_update_is_no_longer_than_the_resultant_nor_that_than_one(x64, seed):
    theta_q, theta_k = inputs(5, 4, seed)[0], inputs(9, 4, seed + 10)[0]
    resultant = circular_mean(random_weights(5, 9, seed), theta_k)
    modulus = np.abs(np.asarray(resultant))
    assert np.all(np.abs(tangent_update(theta_q, resultant)) <= modulus + 1e-14)
    assert np.all(modulus <= 1 + 1e-14)
    assert modulus.max() > 0.1


def test_resultant_is_the_mean_phase_and_its_agreement():
    theta_k = jnp.radians(jnp.array([[179.0, 10.0], [-179.0, 10.0]]))
    resultant = circular_mean(jnp.full((1, 2), 0.5), theta_k)
    close(np.abs(np.degrees(np.angle(resultant))), [[180.0, 10.0]], 1e-3)
    close(np.abs(resultant), [[np.cos(np.radians(1.0)), 1.0]], 1e-6)


def test_update_is_the_gradient_of_the_coherence(x64):
    theta_q, theta_k = inputs(4, 3, 1)[0], inputs(6, 3, 2)[0]
    weights = random_weights(4, 6)
    update = np.asarray(tangent_update(theta_q, circular_mean(weights, theta_k)))

    def coherence(theta_q):
        difference = theta_k[None, :, :] - theta_q[:, None, :]
        return jnp.sum(weights[:, :, None] * jnp.cos(difference))

    close(update, jax.grad(coherence)(theta_q), 1e-14)

    step = 1e-5
    for t, j in np.ndindex(update.shape):
        values = []
        for sign in (1, -1):
            moved = np.array(theta_q[t])
            moved[j] += sign * step
            values.append(reference.coherence(weights[t], moved, theta_k))
        close(update[t, j], (values[0] - values[1]) / (2 * step), 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_each_row_of_weights_maximises_score_plus_entropy(x64, seed):
    score = score_of(*inputs(5, 3, seed), jnp.arange(5))
    causal = np.tri(5, dtype=bool)
    weights = np.asarray(attention_weights(score, jnp.asarray(causal)))
    rng = np.random.default_rng(seed)
    for t in range(5):
        row, row_score = weights[t, : t + 1], np.asarray(score)[t, : t + 1]
        close(weights[t, t + 1 :], 0.0, 0.0)
        best = reference.free_energy(row, row_score)
        for size in (1e-3, 0.1, 1.0):
            other = (1 - size) * row + size * rng.dirichlet(np.ones(t + 1))
            assert reference.free_energy(other, row_score) <= best + 1e-13
        if t == 0:
            continue
        optimum = optimize.minimize(
            lambda p, s=row_score: -reference.free_energy(p, s),
            np.full(t + 1, 1 / (t + 1)),
            method="SLSQP",
            bounds=[(1e-9, 1.0)] * (t + 1),
            constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
            options={"ftol": 1e-13},
        )
        close(row, optimum.x, 1e-4)
        close(best, -optimum.fun, 1e-9)


def test_drift_is_a_bare_score_of_phases_that_advance(x64):
    theta, gate_q, gate_k, tau, omega = inputs(5, 3)
    positions = jnp.array([0, 1, 2, 7, 11])
    advanced = theta + omega[None, :] * positions[:, None].astype(theta.dtype)
    bare = score_of(advanced, gate_q, gate_k, tau, jnp.zeros_like(omega), positions)
    close(score_of(theta, gate_q, gate_k, tau, omega, positions), bare, 1e-13)


# Symmetries


@pytest.mark.parametrize("shift", [1, 1_000, 100_000])
def test_score_depends_on_position_differences_alone(shift):
    args, positions = inputs(6, 3), jnp.arange(6)
    score = score_of(*args, positions)
    close(score_of(*args, positions + shift), score, 5e-6)
    assert np.abs(score_of(*args, 2 * positions) - score).max() > 0.1


@every_implementation
@pytest.mark.parametrize("shift", [1, 100_000])
def test_update_depends_on_position_differences_alone(implementation, shift):
    args = inputs(6, 3)
    update = attend(implementation)(*args)
    close(attend(implementation, positions=jnp.arange(6) + shift)(*args), update, 5e-6)
    assert np.abs(attend(implementation, positions=2 * jnp.arange(6))(*args) - update).max() > 0.01


def test_zero_rates_give_the_bare_torus_kernel(x64):
    theta, gate_q, gate_k, tau, omega = inputs(5, 3)
    still = score_of(theta, gate_q, gate_k, tau, jnp.zeros(3), jnp.array([3, 1, 4, 1, 5]))
    gates = gate_q[:, None, :] * gate_k[None, :, :]
    bare = jnp.sum(gates * jnp.cos(theta[:, None, :] - theta[None, :, :]), axis=-1)
    close(still, tau / np.sqrt(3) * bare, 1e-13)
    same_place = score_of(theta, gate_q, gate_k, tau, omega, jnp.full((5,), 4))
    close(still, same_place, 1e-13)


def test_everything_that_reads_the_lift_has_period_two_pi(x64):
    theta, *rest = inputs(5, 3)
    turns = np.random.default_rng(3).integers(-3, 4, (5, 3))
    turned = theta + 2 * np.pi * jnp.asarray(turns, theta.dtype)
    weights = random_weights(5, 5)
    readers = [
        layer.phase_features,
        lambda theta: score_of(theta, *rest, jnp.arange(5)),
        lambda theta: circular_mean(weights, theta),
        lambda theta: tangent_update(theta, jnp.full((5, 3), 0.3 + 0.4j)),
        lambda theta: kuramoto_coupling(weights, theta, theta),
        lambda theta: order_parameter(theta, axis=0),
    ]
    for implementation in IMPLEMENTATIONS:
        function = attend(implementation)
        readers.append(lambda theta, function=function: function(theta, *rest))
    for reader in readers:
        close(reader(turned), reader(theta), 1e-12)


@every_implementation
def test_a_common_shift_of_phase_changes_nothing(x64, implementation):
    theta, *rest = inputs(5, 3)
    shifted = theta + jnp.array([[0.7, -2.0, 5.0]])
    positions = jnp.arange(5)
    close(score_of(shifted, *rest, positions), score_of(theta, *rest, positions), 1e-13)
    close(attend(implementation)(shifted, *rest), attend(implementation)(theta, *rest), 1e-13)


def test_a_common_shift_turns_the_resultant():
    theta, weights = inputs(5, 3)[0], random_weights(4, 5)
    turned = circular_mean(weights, theta + 0.7)
    close(turned, np.exp(0.7j) * np.asarray(circular_mean(weights, theta)), 1e-6)


# What depends on what


def test_with_fixed_weights_coordinates_do_not_mix(x64):
    theta, weights = inputs(4, 3)[0], random_weights(4, 4)

    def update(theta):
        return tangent_update(theta, circular_mean(weights, theta))

    jacobian = np.asarray(jax.jacobian(update)(theta))
    for i, j in itertools.product(range(3), repeat=2):
        block = np.abs(jacobian[:, i, :, j])
        assert block.max() == 0 if i != j else block.min() > 0


@every_implementation
def test_nothing_flows_back_from_later_tokens(implementation):
    args = inputs(5, 2)
    jacobians = jax.jit(jax.jacobian(attend(implementation), argnums=(0, 1, 2)))(*args)
    for name, jacobian in zip(("theta", "gate_q", "gate_k"), jacobians, strict=True):
        size = np.abs(np.asarray(jacobian)).max(axis=(1, 3))
        close(np.triu(size, 1), 0.0, 0.0)
        if name == "gate_q":
            assert np.all(np.diag(size)[1:] > 0)
        else:
            assert np.all(size[np.tril_indices(5, -1)] > 0)


@every_implementation
@pytest.mark.parametrize("changed", [0, 1, 3, 5])
def test_a_change_moves_no_earlier_row(implementation, changed):
    theta, gate_q, gate_k, *rest = inputs(6, 3)
    function = attend(implementation)
    before = np.asarray(function(theta, gate_q, gate_k, *rest))
    row = jnp.arange(6)[:, None] == changed
    moved = [jnp.where(row, a + 0.5, a) for a in (theta, gate_q, gate_k)]
    after = np.asarray(function(*moved, *rest))
    close(after[:changed], before[:changed], 0.0)
    assert np.all(np.abs(after - before)[max(changed, 1) :].max(axis=1) > 1e-4)


@every_implementation
@pytest.mark.parametrize("tokens", [1, 5])
def test_first_token_alone_does_not_move(implementation, tokens):
    close(attend(implementation)(*inputs(tokens, 3))[0], 0.0, 1e-6)


@every_implementation
def test_equal_phases_do_not_move(implementation):
    theta, *rest = inputs(5, 3)
    together = jnp.broadcast_to(theta[:1], theta.shape)
    close(attend(implementation, mask="full")(together, *rest), 0.0, 1e-6)


def test_symmetric_coupling_leaves_the_mean_phase(x64):
    theta, weights = inputs(6, 3)[0], random_weights(6, 6)
    update = kuramoto_coupling(weights + weights.T, theta, theta)
    close(jnp.sum(update, axis=0), 0.0, 1e-13)
    lopsided = kuramoto_coupling(weights, theta, theta)
    assert np.all(np.abs(jnp.sum(lopsided, axis=0)) > 1e-3)


@every_implementation
def test_uniform_attention_leaves_the_mean_phase(x64, implementation):
    theta, gate_q, gate_k, tau, omega = inputs(6, 3)
    function = attend(implementation, mask="full")
    update = function(theta, gate_q, gate_k, jnp.zeros_like(tau), omega)
    close(jnp.sum(update, axis=0), 0.0, 1e-13)
    assert np.abs(update).max() > 0.1


# Empty rows


MASK = np.array(
    [
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 0, 1, 0, 1],
        [0, 1, 1, 1, 1],
    ],
    bool,
)


def test_empty_rows_of_weights_are_zero():
    score = score_of(*inputs(5, 3), jnp.arange(5))
    weights = attention_weights(score, jnp.asarray(MASK))
    close(weights, reference.attention_weights(np.asarray(score), MASK), 1e-6)
    close(jnp.sum(weights, axis=1), MASK.any(axis=1), 1e-6)
    slope = jax.grad(lambda s: jnp.sum(attention_weights(s, jnp.asarray(MASK)) ** 2))(score)
    assert np.all(np.isfinite(slope))
    close(np.asarray(slope)[~MASK], 0.0, 0.0)


@every_implementation
def test_empty_rows_are_zero_and_leave_the_other_gradients_alone(implementation):
    args = inputs(5, 3)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)), jnp.float32)
    present = MASK.any(axis=1)
    filled = MASK | (~present[:, None] & np.eye(5, dtype=bool)[:, [1, 2, 3, 4, 0]])

    def loss(*args, mask, weight):
        update = layer.kuramoto_attention(*args, mask=mask, implementation=implementation)
        return jnp.sum(weight * update), update

    slope = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))
    with_empty, update = slope(*args, mask=jnp.asarray(MASK), weight=weight)
    without, _ = slope(
        *args, mask=jnp.asarray(filled), weight=weight * jnp.asarray(present[:, None], jnp.float32)
    )
    close(np.asarray(update)[~present], 0.0, 0.0)
    for one, other in zip(with_empty, without, strict=True):
        assert np.all(np.isfinite(one))
        close(one, other, 1e-6)


@every_implementation
def test_a_mask_of_nothing_gives_zeros(implementation):
    args = inputs(3, 2)
    mask = jnp.zeros((3, 3), bool)

    def loss(*args):
        update = layer.kuramoto_attention(*args, mask=mask, implementation=implementation)
        return jnp.sum(update + update**2), update

    slopes, update = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))(*args)
    close(update, 0.0, 0.0)
    for slope in slopes:
        close(slope, 0.0, 0.0)


# Gradients at the corners


@every_implementation
def test_gradients_are_finite_at_equal_and_opposite_phases(implementation):
    def loss(*args):
        update = attend(implementation, mask="full")(*args)
        return jnp.sum(update) + jnp.sum(update**2)

    slopes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))
    ones = jnp.ones((2, 1))
    for phases in ([0.0, 0.0], [1.0, 1.0], [0.0, np.pi], [-np.pi, np.pi]):
        theta = jnp.array(phases, jnp.float32)[:, None]
        results = slopes(theta, ones, ones, jnp.zeros(()), jnp.zeros(1))
        for result in jax.tree.leaves(results):
            assert np.all(np.isfinite(result))


def test_order_parameter_has_a_gradient_where_it_vanishes():
    def modulus(theta):
        return jnp.abs(order_parameter(theta, axis=0))

    for phases in ([0.0, np.pi], [0.0, 0.0], [0.0, np.pi / 2, np.pi, -np.pi / 2]):
        theta = jnp.array(phases, jnp.float32)
        slope = jax.grad(modulus)(theta)
        assert np.all(np.isfinite(slope))
        assert np.abs(slope).max() <= 1


@pytest.mark.parametrize(
    ("implementation", "kind"), [("reference", "norm"), ("xla", "norm"), ("xla", "coordinate")]
)
def test_gradient_stays_level_as_the_input_shrinks_to_zero(implementation, kind):
    theta, _, _, tau, omega = inputs(5, 3)
    rng = np.random.default_rng(0)
    w_q, w_k, w_v = (jnp.asarray(w, jnp.float32) for w in rng.normal(size=(3, 6, 3)))
    readout = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)

    def loss(theta, w_q, w_k, w_v, tau, omega):
        lift = phase_features(theta)
        gates = [normalized_gate(lift @ w) for w in (w_q, w_k)]
        update = layer.kuramoto_attention(theta, *gates, tau, omega, implementation=implementation)
        step = bounded(lift @ w_v * update, jnp.full((3,), 0.5), kind)
        return jnp.sum(readout * step)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4, 5)))
    sizes = []
    for scale in (1.0, 1e-3, 1e-6, 0.0):
        slopes = gradient(scale * theta, w_q, w_k, w_v, tau, omega)
        sizes.append(np.sqrt(sum(float(jnp.sum(s**2)) for s in slopes)))
    assert np.all(np.isfinite(sizes))
    assert max(sizes) < 100
    close(sizes[2:], sizes[1], 0.01 * sizes[1])
    assert sizes[1] > 0.01
