"""What the layers of a trained Kuramoto model do with a text, in the terms of coupled oscillators.

`trace` follows one text through a model and keeps the phases around every step, the coupling
matrices and the gates; `layer_statistics` reduces them to numbers. `attention_dynamics` repeats one
layer's attention alone, the setting in which self-attention is known to cluster its tokens
(Geshkovski et al., arXiv:2305.05465, 2312.10794), and `cluster_count` counts the clusters.

Everything is of one text, so there is no batch axis; S counts recorded times.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kuramoto_jax import kernels, layer
from kuramoto_jax.config import ConfigError, ModelConfig
from kuramoto_jax.modules import KuramotoAttention, KuramotoBlock, PhaseEmbed, TanhBound

CLUSTER_ANGLE = 0.3  # radians
DYNAMICS_TOKENS = 128  # the first tokens of a text, whose attention is repeated


class Trace(struct.PyTreeNode):
    """One text's way through a model. What an ablated model lacks is None.

    Attributes:
      theta_LTD: phases that enter each layer.
      middle_LTD: phases after its attention step.
      after_LTD: phases after its feed-forward step; `after_LTD[-1]` is what the readout sees.
      weights_LHTU: coupling matrices A.
      gate_q_LHTK: gates of the queries.
      gate_k_LHTK: gates of the keys.
      value_gate_LHTK: signed value gates v.
      tau_LH: inverse temperatures.
      omega_LHK: drift rates in radians a token.
      attention_radius_LD: radii of the bound on the attention step, in radians.
      feedforward_radius_LD: radii of the bound on the feed-forward step, in radians.
    """

    theta_LTD: jax.Array
    middle_LTD: jax.Array
    after_LTD: jax.Array
    weights_LHTU: jax.Array
    gate_q_LHTK: jax.Array | None
    gate_k_LHTK: jax.Array | None
    value_gate_LHTK: jax.Array | None
    tau_LH: jax.Array
    omega_LHK: jax.Array | None
    attention_radius_LD: jax.Array | None
    feedforward_radius_LD: jax.Array | None

    @property
    def depth_NTD(self) -> jax.Array:
        """Phases at the N = L + 1 depths: as embedded, and after each layer."""
        return jnp.concatenate([self.theta_LTD[:1], self.after_LTD])


def trace(config: ModelConfig, params: Mapping[str, Any], tokens_T: jax.Array) -> Trace:
    """Runs a model on a text and keeps what its layers compute.

    Args:
      config: of a Kuramoto model.
      params: its parameters.
      tokens_T: [T] int32 symbols.

    Returns:
      The trace; phases are the model's own, gates and weights are in at least float32.

    Raises:
      ConfigError: for another kind of model.
    """
    if config.name != "kuramoto":
        raise ConfigError(
            f"model.name={config.name!r}: has no phases to analyse; must be 'kuramoto'"
        )
    return _trace(config, params, tokens_T)


@functools.partial(jax.jit, static_argnums=0)
def _trace(config: ModelConfig, params: Mapping[str, Any], tokens_T: jax.Array) -> Trace:
    theta_BTD = PhaseEmbed(config).apply({"params": params["embed"]}, tokens_T[None])

    def one_layer(theta_BTD: jax.Array, block: Mapping[str, Any]) -> tuple[jax.Array, Trace]:
        (after_BTD, _), state = KuramotoBlock(config).apply(
            {"params": block}, theta_BTD, mutable=["intermediates"]
        )
        middle_BTD = state["intermediates"]["after_attention"][0]
        seen = _seen(state["intermediates"]["attention"])
        gate_q_HTK, gate_k_HTK = seen.get("gates", (None, None))
        query_HTC, key_HTC, _ = seen["features"]
        return after_BTD, Trace(
            theta_LTD=theta_BTD[0],
            middle_LTD=middle_BTD[0],
            after_LTD=after_BTD[0],
            weights_LHTU=_weights(query_HTC, key_HTC, _allowed("causal", tokens_T.size)),
            gate_q_LHTK=gate_q_HTK,
            gate_k_LHTK=gate_k_HTK,
            value_gate_LHTK=seen.get("value_gates"),
            tau_LH=block["attention"]["tau"],
            omega_LHK=seen.get("rates"),
            attention_radius_LD=block.get("attention_bound", {}).get("radius"),
            feedforward_radius_LD=block.get("feedforward_bound", {}).get("radius"),
        )

    return jax.lax.scan(one_layer, theta_BTD, params["blocks"])[1]


def _seen(intermediates: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `KuramotoAttention` sows of a batch of one, without that axis."""
    seen = {name: values[0] for name, values in intermediates.items()}
    return jax.tree.map(lambda x: x[0] if x.ndim == 4 else x, seen)


def _allowed(mask: str, tokens: int) -> jax.Array:
    """Returns a named mask as a boolean array [T, T]."""
    allowed_TT = layer.mask_array(mask, tokens, tokens)
    return jnp.ones((tokens, tokens), bool) if allowed_TT is None else allowed_TT


def _weights(query_HTC: jax.Array, key_HTC: jax.Array, allowed_TT: jax.Array) -> jax.Array:
    """Returns the coupling matrices [H, T, T] of query and key features."""
    score_HTT = jax.vmap(lambda query, key: kernels.dot(query, key, (1, 1)))(query_HTC, key_HTC)
    return jax.vmap(lambda score_TT: layer.attention_weights(score_TT, allowed_TT))(score_HTT)


def coherence(weights_TU: jax.Array, theta_q_TK: jax.Array, theta_k_TK: jax.Array) -> jax.Array:
    """How far tokens agree with those they attend to, the mean over coordinates.

    C_t = 1/K sum_u A_tu sum_j cos(theta_uj - theta_tj), from -1 to 1. At fixed A and theta_u its
    gradient with respect to theta_t is a_t / K.

    Args:
      weights_TU: [T, U] weights.
      theta_q_TK: [T, K] angles theta_t.
      theta_k_TK: [U, K] angles theta_u.

    Returns:
      [T].

    Source: paper, Lemma 3.
    """
    resultant_TK = layer.circular_mean(weights_TU, theta_k_TK)
    aligned_TK = jnp.cos(theta_q_TK) * jnp.real(resultant_TK)
    aligned_TK += jnp.sin(theta_q_TK) * jnp.imag(resultant_TK)
    return jnp.mean(aligned_TK, axis=-1)


def entropy(weights_TU: jax.Array) -> jax.Array:
    """Entropy of each row of weights in nats, -sum_u A_tu log A_tu with 0 log 0 = 0: [T]."""
    return jnp.sum(jax.scipy.special.entr(weights_TU), axis=-1)


def distance(weights_TU: jax.Array) -> jax.Array:
    """Mean distance in tokens to what is attended to, sum_u A_tu |t - u|: [T]."""
    queries_T1 = jnp.arange(weights_TU.shape[0])[:, None]
    keys_1U = jnp.arange(weights_TU.shape[1])[None, :]
    return jnp.sum(weights_TU * jnp.abs(queries_T1 - keys_1U).astype(weights_TU.dtype), axis=-1)


def participation(gate_TK: jax.Array) -> jax.Array:
    """Part of the coordinates that share in a gate, (sum_j g_j)^2 / (K sum_j g_j^2): [T].

    1 where all gates are equal, 1 / K where one coordinate has all the weight.
    """
    return jnp.square(jnp.mean(gate_TK, axis=-1)) / jnp.mean(jnp.square(gate_TK), axis=-1)


def cluster_count(theta_TK: np.ndarray, angle: float = CLUSTER_ANGLE) -> int:
    """Number of groups of tokens with nearly equal phases.

    Two tokens are linked where mean_j cos(theta_tj - theta_uj) >= cos(angle), as it is for tokens
    that differ by `angle` in every coordinate; a cluster is what is connected by links (single
    linkage, so a chain of neighbours is one cluster).

    Args:
      theta_TK: [T, K] angles.
      angle: largest typical phase difference of linked tokens, in radians.

    Returns:
      From 1 to T.
    """
    phasor_TK = np.exp(1j * np.asarray(theta_TK, np.float64))
    agreement_TU = (phasor_TK @ phasor_TK.conj().T).real / phasor_TK.shape[1]
    linked_TU = agreement_TU >= np.cos(angle)
    np.fill_diagonal(linked_TU, True)
    label_T = np.arange(len(linked_TU))
    while True:
        # Each token takes the smallest label among those it is linked to.
        smallest_T = np.where(linked_TU, label_T[None, :], len(label_T)).min(axis=1)
        if np.array_equal(smallest_T, label_T):
            return np.unique(label_T).size
        label_T = smallest_T


def _gate_statistics(gate_TK: jax.Array | None) -> dict[str, jax.Array] | None:
    if gate_TK is None:
        return None
    gate_TK = gate_TK.astype(jnp.float32)
    return {
        "mean": jnp.mean(gate_TK),
        "std": jnp.std(gate_TK),
        "participation": jnp.mean(participation(gate_TK)),
    }


def _value_gate_statistics(value_gate_TK: jax.Array | None) -> dict[str, jax.Array] | None:
    if value_gate_TK is None:
        return None
    value_TK = value_gate_TK.astype(jnp.float32)
    return {
        "mean": jnp.mean(value_TK),
        "std": jnp.std(value_TK),
        "part_synchronising": jnp.mean(value_TK > 0),
        "part_repelling": jnp.mean(value_TK < 0),
        "mean_synchronising": jnp.mean(value_TK, where=value_TK > 0),
        "mean_repelling": jnp.mean(value_TK, where=value_TK < 0),
    }


def head_statistics(
    theta_TK: jax.Array,
    moved_TK: jax.Array,
    weights_TU: jax.Array,
    gate_q_TK: jax.Array | None,
    gate_k_TK: jax.Array | None,
    value_gate_TK: jax.Array | None,
) -> dict[str, Any]:
    """Numbers of one causal head on one text, means over its tokens and coordinates.

    order               |G_tj|, the modulus of the resultant: how far the attended tokens agree
    order_uniform       the same under equal weights on all u <= t, to compare with
    coherence_before    `coherence` of the phases that enter the attention step
    coherence_slope     sum_u A_tu sin(theta_uj - theta_tj) times the step: the first-order change,
                        positive where a token moves up the gradient of its coherence (Lemma 3)
    coherence_alone     after a token's own step, all others where they were: below before plus
                        slope by what a finite step overshoots
    coherence_after     after the step of all tokens, under the same weights
    entropy             nats; entropy_relative: over log(t + 1), the first token left out
    distance            tokens; distance_uniform: under equal weights, (T - 1) / 4
    gate_q, gate_k      mean, standard deviation, and `participation`
    value_gate          mean, standard deviation, and for v > 0 and v < 0 the part and the mean

    Args:
      theta_TK: [T, K] phases that enter the attention step.
      moved_TK: [T, K] phases that leave it.
      weights_TU: [T, T] weights, zero for u > t.
      gate_q_TK: [T, K] gates of the queries, or None.
      gate_k_TK: [T, K] gates of the keys, or None.
      value_gate_TK: [T, K] value gates, or None.

    Returns:
      Nested scalars; None for a gate that is None, NaN for the mean of nothing.
    """
    tokens = theta_TK.shape[0]
    uniform_TU = layer.attention_weights(
        jnp.zeros_like(weights_TU), layer.mask_array("causal", tokens, tokens)
    )
    resultant_TK = layer.circular_mean(weights_TU, theta_TK)
    coupling_TK = layer.tangent_update(theta_TK, resultant_TK)
    itself_T = jnp.diagonal(weights_TU)  # a token agrees with itself wherever it goes
    alone_T = itself_T + coherence(weights_TU - jnp.diag(itself_T), moved_TK, theta_TK)
    entropy_T, most_T = entropy(weights_TU), jnp.log1p(jnp.arange(tokens, dtype=jnp.float32))
    return {
        "order": jnp.mean(jnp.abs(resultant_TK)),
        "order_uniform": jnp.mean(jnp.abs(layer.circular_mean(uniform_TU, theta_TK))),
        "coherence_before": jnp.mean(coherence(weights_TU, theta_TK, theta_TK)),
        "coherence_slope": jnp.mean(coupling_TK * (moved_TK - theta_TK)),
        "coherence_alone": jnp.mean(alone_T),
        "coherence_after": jnp.mean(coherence(weights_TU, moved_TK, moved_TK)),
        "entropy": jnp.mean(entropy_T),
        "entropy_relative": jnp.mean(entropy_T[1:] / most_T[1:]),
        "distance": jnp.mean(distance(weights_TU)),
        "distance_uniform": jnp.mean(distance(uniform_TU)),
        "gate_q": _gate_statistics(gate_q_TK),
        "gate_k": _gate_statistics(gate_k_TK),
        "value_gate": _value_gate_statistics(value_gate_TK),
    }


def _heads(theta: jax.Array, heads: int) -> jax.Array:
    """Splits [..., T, D] phases into heads: [..., H, T, K]."""
    return jnp.moveaxis(theta.reshape(*theta.shape[:-1], heads, -1), -2, -3)


@jax.jit
def _all_head_statistics(trace: Trace) -> dict[str, Any]:
    """Returns `head_statistics` with leading axes L and H."""
    heads = trace.tau_LH.shape[1]
    return jax.vmap(jax.vmap(head_statistics))(
        _heads(trace.theta_LTD, heads),
        _heads(trace.middle_LTD, heads),
        trace.weights_LHTU,
        trace.gate_q_LHTK,
        trace.gate_k_LHTK,
        trace.value_gate_LHTK,
    )


def _plain(value: Any) -> Any:
    """Returns arrays as numbers and lists of six digits; what is not finite becomes None."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if np.ndim(value):
        return [_plain(item) for item in value]
    return float(f"{float(value):.6g}") if np.isfinite(value) else None


def _update_statistics(update_TD: np.ndarray, radius_D: np.ndarray | None) -> dict[str, Any]:
    """Size of an update in radians and, where it has a bound, in units of the radii."""
    rms = np.sqrt(np.mean(np.square(update_TD)))
    if radius_D is None:
        return {"rms": rms, "radius": None, "saturation": None}
    saturation = np.sqrt(np.mean(np.square(update_TD / radius_D)))
    return {"rms": rms, "radius": np.mean(np.abs(radius_D)), "saturation": saturation}


def layer_statistics(config: ModelConfig, trace: Trace) -> list[dict[str, Any]]:
    """Reduces a trace to numbers, ready for JSON.

    Args:
      config: the model's configuration.
      trace: from `trace`, of at least two tokens.

    Returns:
      For each layer its index `layer`, `attention_update` and `feedforward_update` (`rms` in
      radians, mean `radius`, and `saturation`, the rms in units of the radii, which the bound keeps
      below 1), and `heads`: for each its index `head`, `tau`, `omega` in radians a token, and
      `head_statistics`. None where the model lacks the thing.
    """
    learned = {"tau": trace.tau_LH, "omega": trace.omega_LHK}
    numbers_LH = jax.device_get(learned | _all_head_statistics(trace))
    trace = jax.device_get(trace)
    rows = []
    for index in range(config.layers):
        here, numbers_H = (
            jax.tree.map(lambda x, index=index: x[index], tree) for tree in (trace, numbers_LH)
        )
        attention = _update_statistics(here.middle_LTD - here.theta_LTD, here.attention_radius_LD)
        feedforward = None
        if config.feedforward != "none":
            feedforward = _update_statistics(
                here.after_LTD - here.middle_LTD, here.feedforward_radius_LD
            )
        heads = [
            {"head": head} | jax.tree.map(lambda x, head=head: x[head], numbers_H)
            for head in range(config.heads)
        ]
        row = {"attention_update": attention, "feedforward_update": feedforward, "heads": heads}
        rows.append(_plain({"layer": index} | row))
    return rows


def state_statistics(theta_STD: jax.Array, heads: int) -> dict[str, Any]:
    """Synchrony of whole states of T tokens, ready for JSON.

    Args:
      theta_STD: [S, T, D] phases at S times or depths.
      heads: H.

    Returns:
      `order` [S], the mean over coordinates of the order parameter |mean_t exp(i theta_tj)|;
      `order_coordinates` [D], the order parameters at the last of the S; `clusters` [S][H], the
      `cluster_count` of each head.
    """
    order_SD = np.asarray(jnp.abs(layer.order_parameter(theta_STD, axis=1)))
    theta_SHTK = np.asarray(_heads(theta_STD, heads))
    return {
        "order": _plain(order_SD.mean(axis=1)),
        "order_coordinates": _plain(order_SD[-1]),
        "clusters": [[cluster_count(theta_TK) for theta_TK in row] for row in theta_SHTK],
    }


def attention_dynamics(
    config: ModelConfig,
    block: Mapping[str, Any],
    theta_TD: jax.Array,
    *,
    repeats: int,
    mask: str = "causal",
    bare: bool = False,
) -> jax.Array:
    """Repeats one layer's attention step, without feed-forward and with the same parameters.

    theta <- theta + bound(v(theta) a(theta)), the weights A anew from the phases every time. The
    bare variant has no gates, no value gate, no drift and no bound, theta <- theta + a(theta) with
    the layer's tau: phases within a half circle never leave the arc they span, and end in one
    point.

    Args:
      config: the model's configuration.
      block: parameters of one layer, see `layer_params`.
      theta_TD: [T, D] phases to start from.
      repeats: attention steps.
      mask: "causal" or "full".
      bare: whether to leave out all that is learned but tau.

    Returns:
      [repeats + 1, T, D] phases, the start first.
    """
    allowed_TT = _allowed(mask, theta_TD.shape[0])
    return _attention_dynamics(config, repeats, bare, block, theta_TD, allowed_TT)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attention_dynamics(
    config: ModelConfig,
    repeats: int,
    bare: bool,
    block: Mapping[str, Any],
    theta_TD: jax.Array,
    allowed_TT: jax.Array,
) -> jax.Array:
    update = _bare_update if bare else _attention_update

    def step(theta_TD: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        moved_TD = theta_TD + update(config, block, theta_TD, allowed_TT)
        return moved_TD, moved_TD

    _, theta_STD = jax.lax.scan(step, theta_TD, length=repeats)
    return jnp.concatenate([theta_TD[None], theta_STD])


def _attention_update(
    config: ModelConfig, block: Mapping[str, Any], theta_TD: jax.Array, allowed_TT: jax.Array
) -> jax.Array:
    """Returns bound(v a) [T, D], the attention step of a block, under any mask."""
    _, state = KuramotoAttention(config).apply(
        {"params": block["attention"]}, theta_TD[None], mutable=["intermediates"]
    )
    seen = _seen(state["intermediates"])
    query_HTC, key_HTC, value_HTC = seen["features"]
    weights_HTU = _weights(query_HTC, key_HTC, allowed_TT).astype(value_HTC.dtype)
    resultant_HTC = jax.vmap(kernels.dot)(weights_HTU, value_HTC)
    lift_HTC = layer.phase_features(_heads(theta_TD, config.heads))
    update_HTK = layer.tangent_from_lift(lift_HTC, resultant_HTC)
    if "value_gates" in seen:
        update_HTK = seen["value_gates"].astype(update_HTK.dtype) * update_HTK
    update_TD = jnp.moveaxis(update_HTK, 0, 1).reshape(theta_TD.shape)
    if config.bound == "none":
        return update_TD
    return TanhBound(config).apply({"params": block["attention_bound"]}, update_TD[None])[0]


def _bare_update(
    config: ModelConfig, block: Mapping[str, Any], theta_TD: jax.Array, allowed_TT: jax.Array
) -> jax.Array:
    """Returns a [T, D] without gates and drift, at the layer's tau."""
    coupling = functools.partial(layer.kuramoto_attention, mask=allowed_TT)
    coupling_HTK = jax.vmap(lambda theta_TK, tau: coupling(theta_TK, None, None, tau, None))(
        _heads(theta_TD, config.heads), block["attention"]["tau"]
    )
    return jnp.moveaxis(coupling_HTK, 0, 1).reshape(theta_TD.shape)


def layer_params(params: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Returns the parameters of one layer of a Kuramoto model."""
    return jax.tree.map(lambda p: p[index], params["blocks"])


def recorded_times(repeats: int, points: int = 16) -> list[int]:
    """Returns 0 and about `points` whole times up to `repeats`, evenly spaced in the logarithm."""
    return [0, *np.unique(np.geomspace(1, repeats, points).round().astype(int)).tolist()]


def dynamics_statistics(
    config: ModelConfig, params: Mapping[str, Any], trace: Trace, repeats: int
) -> dict[str, Any]:
    """Follows every layer's attention-only dynamics from the phases that enter it.

    To save time it is that of the text's first tokens; under causal attention, later ones have no
    effect on them.

    Args:
      config: the model's configuration.
      params: its parameters.
      trace: of the text, from `trace`.
      repeats: attention steps.

    Returns:
      `tokens` that take part, `times`, the numbers of repeats recorded, and `runs`: for each layer,
      each `mask` and each `variant` ("trained" or "bare") the `state_statistics` at those times.
    """
    times = recorded_times(repeats)
    theta_LTD = trace.theta_LTD[:, :DYNAMICS_TOKENS]
    runs = []
    for index in range(config.layers):
        block = layer_params(params, index)
        for variant in ("trained", "bare"):
            for mask in layer.MASKS:
                theta_STD = attention_dynamics(
                    config,
                    block,
                    theta_LTD[index],
                    repeats=repeats,
                    mask=mask,
                    bare=variant == "bare",
                )
                numbers = state_statistics(theta_STD[np.asarray(times)], config.heads)
                runs.append({"layer": index, "variant": variant, "mask": mask} | numbers)
    return {"tokens": theta_LTD.shape[1], "times": times, "runs": runs}
