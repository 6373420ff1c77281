"""Analysis of a trained model: laws, inputs computed by hand, and the model's own forward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from compiled import attention_weights, circular_mean, kuramoto_coupling

from kuramoto_jax import analysis, layer
from kuramoto_jax.baselines import build
from kuramoto_jax.config import ConfigError, ModelConfig
from kuramoto_jax.modules import position_rates

SIZES = {"layers": 2, "width": 8, "heads": 2, "hidden": 8, "unroll": 1}
CONFIG = ModelConfig(**SIZES)
TOKENS = 9
ABLATIONS = {
    "bare_score": {"gates": False, "drift": "none", "bound": "none"},
    "bare_value": {"value_gate": False, "drift": "fixed", "feedforward": "none"},
    "dense": {"value_projection": True, "normalization": True, "bound": "coordinate"},
    "bfloat16": {"dtype": "bfloat16"},
}
QUICK = {"xla_backend_optimization_level": 0}  # compile fast, run slowly


@functools.cache
def parameters(config):
    """Parameters moved off their initial values by noise, so that nothing is zero or equal."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(build(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(0.3, 0.5, p.shape), p.dtype), shapes["params"]
    )


def text(seed=0, tokens=TOKENS):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, tokens), jnp.int32)


@functools.cache
def traced(config=CONFIG):
    return analysis.trace(config, parameters(config), text())


def statistics(config=CONFIG):
    return analysis.layer_statistics(config, traced(config))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def logits(config, params, tokens):
    return build(config).apply({"params": params}, tokens[None])


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def readout(config, params, theta_TD):
    return build(config).apply(
        {"params": params},
        theta_TD[None],
        method=lambda model, theta: model.readout(theta, model.embed.phases),
    )


coherence, distance, entropy, participation = (
    jax.jit(function, compiler_options=QUICK)
    for function in (
        analysis.coherence,
        analysis.distance,
        analysis.entropy,
        analysis.participation,
    )
)
head_statistics = jax.jit(analysis.head_statistics, compiler_options=QUICK)


def head_numbers(theta_TK, moved_TK, weights_TU, *gates):
    found = head_statistics(theta_TK, moved_TK, weights_TU, *(gates or [None] * 3))
    return jax.tree.map(float, found)


def causal_weights(tokens, seed=0):
    score = np.random.default_rng(seed).normal(0, 2, (tokens, tokens)).astype(np.float32)
    return attention_weights(score, np.tri(tokens, dtype=bool))


def angles(*shape, seed=0, spread=np.pi):
    return np.random.default_rng(seed).uniform(-spread, spread, shape).astype(np.float32)


@pytest.mark.parametrize("depth", [1, 2])
def test_traced_phases_are_the_models_after_every_layer(depth):
    """A model cut after `depth` layers reads out what the trace has there."""
    params = parameters(CONFIG)
    cut = params | {"blocks": jax.tree.map(lambda p: p[:depth], params["blocks"])}
    config = dataclasses.replace(CONFIG, layers=depth)
    found = readout(CONFIG, params, traced().after_LTD[depth - 1])
    np.testing.assert_allclose(found, logits(config, cut, text()), atol=1e-4)


@pytest.mark.parametrize("changes", ABLATIONS.values(), ids=ABLATIONS)
def test_traced_phases_of_ablated_models(changes):
    config = dataclasses.replace(CONFIG, **changes)
    params = parameters(config)
    found = readout(config, params, traced(config).after_LTD[-1])
    np.testing.assert_allclose(found, logits(config, params, text()), atol=1e-4)


def test_what_is_traced_explains_the_attention_step():
    """Steps 2 to 7 of the paper in float64 NumPy, from the traced gates and rates."""
    trace = jax.device_get(traced())
    for index in range(CONFIG.layers):
        theta_TD, moved_TD = trace.theta_LTD[index], np.zeros((TOKENS, CONFIG.width))
        for head in range(CONFIG.heads):
            here = slice(head * CONFIG.head_width, (head + 1) * CONFIG.head_width)
            arrays = (trace.gate_q_LHTK, trace.gate_k_LHTK, trace.tau_LH, trace.omega_LHK)
            gates_and_rates = [array[index, head] for array in arrays]
            moved_TD[:, here] = reference.kuramoto_attention(theta_TD[:, here], *gates_and_rates)
            moved_TD[:, here] *= trace.value_gate_LHTK[index, head]
            score = reference.phase_score(
                theta_TD[:, here], theta_TD[:, here], *gates_and_rates, *[range(TOKENS)] * 2
            )
            weights = reference.attention_weights(score, reference.allowed("causal", TOKENS))
            np.testing.assert_allclose(trace.weights_LHTU[index, head], weights, atol=1e-5)
        step_TD = reference.bounded(moved_TD, trace.attention_radius_LD[index], CONFIG.bound)
        np.testing.assert_allclose(trace.middle_LTD[index], theta_TD + step_TD, atol=1e-5)


def test_another_model_is_refused():
    with pytest.raises(ConfigError, match="transformer"):
        analysis.trace(ModelConfig(name="transformer", **SIZES), {}, text())


def test_equal_phases_have_order_and_coherence_one():
    theta_TK, weights_TU = jnp.full((6, 4), 2.5), causal_weights(6)
    found = head_numbers(theta_TK, theta_TK, weights_TU)
    keys = ["order", "order_uniform"] + [f"coherence_{k}" for k in ("before", "alone", "after")]
    for key in keys:
        assert found[key] == pytest.approx(1.0, abs=1e-5)
    assert found["coherence_slope"] == 0.0
    assert [found[key] for key in ("gate_q", "gate_k", "value_gate")] == [None] * 3


def test_equal_weights_have_known_distance_and_entropy():
    weights_TU = attention_weights(np.zeros((7, 7), np.float32), np.tri(7, dtype=bool))
    np.testing.assert_allclose(distance(weights_TU), np.arange(7) / 2, atol=1e-6)
    np.testing.assert_allclose(entropy(weights_TU), np.log(np.arange(7) + 1), atol=1e-6)
    found = head_numbers(angles(7, 4), angles(7, 4), weights_TU)
    assert found["entropy_relative"] == pytest.approx(1.0, abs=1e-6)
    assert found["distance"] == found["distance_uniform"] == pytest.approx(1.5)
    assert found["order"] == pytest.approx(found["order_uniform"], abs=1e-6)


def test_attention_to_the_token_before():
    weights_TU = np.eye(5, k=-1, dtype=np.float32)
    weights_TU[0, 0] = 1.0
    np.testing.assert_array_equal(distance(weights_TU), [0, 1, 1, 1, 1])
    np.testing.assert_array_equal(entropy(weights_TU), np.zeros(5))


@pytest.mark.parametrize("seed", range(5))
def test_entropy_is_at_most_that_of_equal_weights(seed):
    entropy_T = entropy(causal_weights(20, seed))
    assert np.all(entropy_T >= 0)
    assert np.all(entropy_T <= np.log(np.arange(20) + 1) + 1e-6)


def test_coherence_in_numpy():
    theta_q_TK, theta_k_TK, weights_TU = angles(6, 3, seed=1), angles(6, 3), causal_weights(6)
    for t, found in enumerate(coherence(weights_TU, theta_q_TK, theta_k_TK)):
        expected = reference.coherence(weights_TU[t], theta_q_TK[t], theta_k_TK) / 3
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("step", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_synchronising_step_raises_coherence_and_a_repelling_one_lowers_it(seed, step):
    """Lemma 3: a is the gradient, and steps up to 1 do not overshoot the mean phase."""
    theta_TK, weights_TU = angles(12, 4, seed=seed), causal_weights(12, seed)
    coupling_TK = np.asarray(kuramoto_coupling(weights_TU, theta_TK, theta_TK))
    for sign in (1, -1):
        moved_TK = theta_TK + np.float32(sign * step) * coupling_TK
        found = head_numbers(theta_TK, moved_TK, weights_TU)
        gain = found["coherence_alone"] - found["coherence_before"]
        slope = sign * step * np.mean(np.square(coupling_TK))
        assert found["coherence_slope"] == pytest.approx(slope, rel=1e-3)
        assert sign * gain > 0
        if step < 1e-2:
            assert gain == pytest.approx(slope, rel=0.05)


def test_a_token_agrees_with_itself_wherever_it_goes():
    theta_TK, moved_TK = angles(4, 3), angles(4, 3, seed=1)
    found = head_numbers(theta_TK, moved_TK, jnp.eye(4))
    assert found["coherence_alone"] == pytest.approx(1.0, abs=1e-6)


def test_participation_and_value_gates_by_hand():
    gate_TK = jnp.asarray([[1.0, 1.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(participation(3 * gate_TK), [1.0, 0.25])
    value_TK = jnp.asarray([[1.0, 3.0, -2.0, 0.0]] * 2)
    theta_TK, weights_TU = angles(2, 4), causal_weights(2)
    found = head_numbers(theta_TK, theta_TK, weights_TU, gate_TK, gate_TK, value_TK)
    assert found["gate_q"]["participation"] == pytest.approx(0.625)
    assert found["gate_k"] == {
        "mean": 1.0,
        "std": pytest.approx(1.5**0.5),
        "participation": pytest.approx(0.625),
    }
    assert found["value_gate"] == {
        "mean": 0.5,
        "std": pytest.approx(3.25**0.5),
        "part_synchronising": 0.5,
        "part_repelling": 0.25,
        "mean_synchronising": 2.0,
        "mean_repelling": -2.0,
    }


def test_statistics_of_a_model_are_within_their_bounds():
    rows = statistics()
    assert [row["layer"] for row in rows] == [0, 1]
    for row in rows:
        for update in (row["attention_update"], row["feedforward_update"]):
            assert 0 < update["saturation"] < 1
            assert update["radius"] > 0
        for head in row["heads"]:
            assert 0 < head["order"] <= 1
            assert abs(head["coherence_before"]) <= head["order"]
            assert 0 < head["entropy_relative"] <= 1
            assert head["distance_uniform"] == (TOKENS - 1) / 4
            assert len(head["omega"]) == CONFIG.head_width
            assert head["gate_q"]["mean"] == pytest.approx(1.0, abs=1e-5)
    mean_square = np.mean(np.square(traced().middle_LTD - traced().theta_LTD), axis=(1, 2))
    found = [row["attention_update"]["rms"] for row in rows]
    np.testing.assert_allclose(found, np.sqrt(mean_square), rtol=1e-4)


def test_heads_are_those_of_the_model():
    """Each head's numbers come from its own coordinates and weights."""
    trace, rows = traced(), statistics()
    theta_TK = trace.theta_LTD[1][:, CONFIG.head_width :]
    resultant_TK = circular_mean(trace.weights_LHTU[1, 1], theta_TK)
    expected = np.mean(np.abs(np.asarray(resultant_TK)))
    assert rows[1]["heads"][1]["order"] == pytest.approx(expected, rel=1e-5)
    assert rows[1]["heads"][1]["head"] == 1


def test_what_a_model_lacks_is_none():
    row = statistics(dataclasses.replace(CONFIG, **ABLATIONS["bare_score"]))[0]
    assert [row["heads"][0][key] for key in ("gate_q", "gate_k", "omega")] == [None] * 3
    for update in (row["attention_update"], row["feedforward_update"]):
        assert update["rms"] > 0
        assert update["radius"] is update["saturation"] is None
    row = statistics(dataclasses.replace(CONFIG, **ABLATIONS["bare_value"]))[0]
    assert row["heads"][0]["value_gate"] is row["feedforward_update"] is None
    rates_K = position_rates(CONFIG, CONFIG.head_width)
    assert row["heads"][0]["omega"] == pytest.approx(rates_K, rel=1e-5)


def test_mean_of_no_value_gate_is_none():
    assert analysis._plain({"a": np.float32(np.nan), "b": [1, 2.5]}) == {"a": None, "b": [1, 2.5]}


def test_clusters_by_hand():
    base = np.zeros((2, 3))
    theta_TK = np.concatenate([base, base + 1.0, base + 1.1 + 2 * np.pi, base - 2.0])
    assert analysis.cluster_count(theta_TK) == 3
    assert analysis.cluster_count(theta_TK, angle=0.05) == 4
    assert analysis.cluster_count(theta_TK, angle=1.2) == 2
    assert analysis.cluster_count(theta_TK[:2]) == 1


def test_a_chain_of_neighbours_is_one_cluster():
    chain_TK = np.random.default_rng(0).permutation(np.arange(40) * 0.1)[:, None] * np.ones((1, 2))
    assert analysis.cluster_count(chain_TK, angle=0.11) == 1
    assert analysis.cluster_count(chain_TK, angle=0.09) == 40


def test_tokens_that_differ_in_half_of_their_coordinates_are_apart():
    theta_TK = np.asarray([[0.0, 0.0], [0.0, 2.0]])
    assert analysis.cluster_count(theta_TK) == 2


def test_state_statistics_by_hand():
    opposite_TD = jnp.asarray([[0.0, 0.5], [np.pi, 0.5]])
    found = analysis.state_statistics(jnp.stack([jnp.zeros((2, 2)), opposite_TD]), heads=2)
    assert found["order"] == pytest.approx([1.0, 0.5])
    assert found["order_coordinates"] == pytest.approx([0.0, 1.0], abs=1e-6)
    assert found["clusters"] == [[1, 1], [2, 1]]


@pytest.mark.parametrize("changes", [{}, *ABLATIONS.values()], ids=["whole", *ABLATIONS])
def test_dynamics_begin_as_the_model_does(changes):
    config = dataclasses.replace(CONFIG, **changes)
    trace, block = traced(config), analysis.layer_params(parameters(config), 1)
    found = analysis.attention_dynamics(config, block, trace.theta_LTD[1], repeats=1)
    np.testing.assert_array_equal(found[0], trace.theta_LTD[1])
    atol = 0.05 if config.dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(found[1], trace.middle_LTD[1], atol=atol)


def test_dynamics_go_on_from_where_they_are():
    block, theta_TD = analysis.layer_params(parameters(CONFIG), 0), traced().theta_LTD[0]
    states = analysis.attention_dynamics(CONFIG, block, theta_TD, repeats=3)
    again = analysis.attention_dynamics(CONFIG, block, states[2], repeats=1)
    np.testing.assert_allclose(again[1], states[3], atol=1e-5)


def test_full_attention_lets_the_first_token_move():
    block, theta_TD = analysis.layer_params(parameters(CONFIG), 0), traced().theta_LTD[0]
    for bare in (False, True):
        causal, full = (
            analysis.attention_dynamics(CONFIG, block, theta_TD, repeats=1, mask=mask, bare=bare)
            for mask in layer.MASKS
        )
        np.testing.assert_array_equal(causal[1, 0], theta_TD[0])
        assert np.abs(full[1, 0] - theta_TD[0]).max() > 1e-3


@pytest.mark.parametrize("mask", layer.MASKS)
def test_bare_dynamics_of_a_half_circle_end_in_one_point(mask):
    theta_TD = angles(16, 8, spread=1.5)
    block = analysis.layer_params(parameters(CONFIG), 0)
    states = analysis.attention_dynamics(CONFIG, block, theta_TD, repeats=200, mask=mask, bare=True)
    width_SD = np.ptp(states, axis=1)
    assert np.all(np.diff(width_SD, axis=0) < 1e-5)
    found = analysis.state_statistics(states[jnp.asarray([0, 200])], CONFIG.heads)
    assert found["order"][0] < 0.9
    assert found["order"][1] > 0.999
    assert found["clusters"][0][0] > 1
    assert found["clusters"][1] == [1, 1]
    if mask == "causal":  # all follow the first token, which follows none
        np.testing.assert_allclose(states[-1], np.tile(theta_TD[0], (16, 1)), atol=0.05)


def test_recorded_times_rise_to_the_last():
    for repeats in (1, 2, 7, 100):
        times = analysis.recorded_times(repeats)
        assert times[0] == 0
        assert times[-1] == repeats
        assert np.all(np.diff(times) > 0)
