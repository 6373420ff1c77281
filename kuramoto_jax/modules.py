"""Linen modules of the Kuramoto language model: parameters and names, no mathematics of their own.

The mathematics is in `kuramoto_jax.layer`; here it is given parameters and mapped over batch and
heads. Attention runs head-major, on [B, H, T, K].
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from kuramoto_jax import cache as caching
from kuramoto_jax import kernels, layer
from kuramoto_jax.cache import LayerCache
from kuramoto_jax.config import ModelConfig


def position_rates(model: ModelConfig, width: int) -> np.ndarray:
    """Geometric RoPE rates base^(-j / width), j = 0 .. width - 1, in radians a position."""
    return model.rate_base ** (-np.arange(width) / width)


def _phase_init(model: ModelConfig) -> Callable:
    """Initial phases spread * sign(u) |u|^power, u uniform in +-1.

    With a power above one most symbols nearly agree in a coordinate and few stand apart. Those few
    can be told there by any token, and a token that agrees with the rest is moved by them alone:
    its phase then says that one of them is in sight. The spread is constant or grows along each
    head: a ramp pairs nearly agreeing phases with fast drift, which lets those coordinates carry
    position, and widely spread ones with slow drift, which lets those carry content.
    """

    def init(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        spread_K = np.full(model.head_width, model.phase_spread)
        if model.phase_init == "ramp":
            spread_K = np.linspace(model.phase_spread_min, model.phase_spread, model.head_width)
        spread_D = jnp.asarray(np.tile(spread_K, model.heads), dtype)
        u_VD = jax.random.uniform(key, shape, dtype, -1.0, 1.0)
        return jnp.sign(u_VD) * jnp.abs(u_VD) ** model.phase_power * spread_D[None, :]

    return init


class PhaseEmbed(nn.Module):
    """Learned phase embedding: each symbol is D angles (paper, section 2)."""

    config: ModelConfig

    def setup(self) -> None:
        """Declares `phases` [V, D], in radians."""
        self.phases = self.param(
            "phases", _phase_init(self.config), (self.config.symbols, self.config.width)
        )

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the angles [B, T, D] of tokens [B, T]."""
        return jnp.take(self.phases, tokens_BT, axis=0)


# One nn.Dense a head: [B, T, H, C] to [B, H, T, F], kernel [H, C, F], bias [H, F].
_HeadDense = nn.vmap(
    nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=2, out_axes=1
)


class KuramotoAttention(nn.Module):
    """Steps 1 to 6 of the layer: gates, coupling, and the signed value gate that scales it.

    The gates of a head read the lift of its own K coordinates, or of all D of the token, and are
    normalised within the head; tau is a scalar a head and omega a rate a coordinate. Ablations
    leave out a part with its parameters, or put back what the layer does without: a dense value
    projection, whose output takes the place of the lift as the value, and RMS normalisation of
    what the gates read.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, theta_BTD: jax.Array, cache: LayerCache | None = None, position: jax.Array | int = 0
    ) -> tuple[jax.Array, LayerCache | None]:
        """Returns the increment v(theta) a [B, T, D] before the bound, and the extended cache."""
        config = self.config
        heads, width = config.heads, config.head_width
        theta_BTHK = theta_BTD.reshape(*theta_BTD.shape[:2], heads, width)
        lift_BHTC = layer.phase_features(theta_BTHK.transpose(0, 2, 1, 3))
        inputs_BTHC = lift_BHTC.transpose(0, 2, 1, 3).astype(config.dtype)
        if config.normalization:
            inputs_BTHC = nn.RMSNorm(
                reduction_axes=(-2, -1), feature_axes=(-2, -1), dtype=config.dtype, name="norm"
            )(inputs_BTHC)

        options = {"dtype": config.dtype, "dot_general": kernels.dense_general}

        def gate(name: str, **arguments: Any) -> jax.Array:
            """A linear readout of the inputs, one number a coordinate: [B, H, T, K]."""
            arguments |= options | {"name": name}
            if config.gate_inputs == "head":
                return _HeadDense(width, **arguments)(inputs_BTHC)
            dense = nn.DenseGeneral((heads, width), axis=(-2, -1), **arguments)
            return dense(inputs_BTHC).transpose(0, 2, 1, 3)

        gate_q_BHTK = gate_k_BHTK = None
        if config.gates:
            rho = layer.normalized_gate if config.gate_normalization else nn.softplus
            gate_q_BHTK = rho(gate("gate_q"))
            gate_k_BHTK = rho(gate("gate_k"))
            self.sow("intermediates", "gates", (gate_q_BHTK, gate_k_BHTK))
        tau_H = self.param("tau", nn.initializers.constant(config.tau), (heads,))
        gates_and_rates = (gate_q_BHTK, gate_k_BHTK, tau_H, self._rates())
        positions_T = caching.chunk_positions(position, theta_BTD.shape[1])
        query, key, value = _over_batch_and_heads(
            functools.partial(layer.attention_features, positions=positions_T)
        )(lift_BHTC, *gates_and_rates)
        query, key, value = (x.astype(config.dtype) for x in (query, key, value))
        if config.value_projection:
            project = nn.DenseGeneral(
                (heads, 2 * width), axis=(-2, -1), use_bias=False, name="value", **options
            )
            value = project(inputs_BTHC).transpose(0, 2, 1, 3)
        self.sow("intermediates", "features", (query, key, value))

        chosen = kernels.resolve(
            config.implementation, query.dtype, 2 * width, from_phases=not config.value_projection
        )
        if cache is None and chosen == "pallas":
            increment_BHTK = _over_batch_and_heads(
                functools.partial(kernels.pallas.coupling, positions=positions_T)
            )(theta_BTHK.transpose(0, 2, 1, 3), *gates_and_rates)
        else:
            if cache is None:
                resultant_BHTC = kernels.causal_attention(query, key, value, chosen)
            else:
                resultant_BHTC, cache = caching.cached_attention(query, key, value, cache, position)
            increment_BHTK = layer.tangent_from_lift(lift_BHTC, resultant_BHTC)
        if config.value_gate:
            value_gate_BHTK = gate("value_gate", bias_init=_value_bias(config))
            self.sow("intermediates", "value_gates", value_gate_BHTK)
            increment_BHTK = value_gate_BHTK.astype(increment_BHTK.dtype) * increment_BHTK
        return increment_BHTK.transpose(0, 2, 1, 3).reshape(theta_BTD.shape), cache

    def _rates(self) -> jax.Array | None:
        """Returns omega [H, K]: learned, fixed, or None where phases do not drift."""
        config = self.config
        if config.drift == "none":
            return None
        rates_K = position_rates(config, config.head_width) * config.rate_scale
        if config.rates == "zero":
            rates_K = np.zeros(config.head_width)
        rates_HK = jnp.asarray(np.tile(rates_K, (config.heads, 1)), jnp.float32)
        if config.drift == "learned":
            rates_HK = self.param("omega", lambda key: rates_HK)
        self.sow("intermediates", "rates", rates_HK)
        return rates_HK


def _value_bias(config: ModelConfig) -> Callable:
    """Returns the initialiser of the value gate's bias, the same for every head."""
    bias_K = {
        "ones": np.ones(config.head_width),
        "alternating": 1.0 - np.arange(config.head_width) % 2,
        "zeros": np.zeros(config.head_width),
    }[config.value_bias]
    # A Dense initialises the [K] of one head, a DenseGeneral the flat [H K] of all.
    return lambda key, shape, dtype: jnp.asarray(np.resize(bias_K, shape), dtype)


def _over_batch_and_heads(function: Callable) -> Callable:
    """Maps a function of one head over [B, H, ...] phases and gates and [H, ...] parameters."""
    over_heads = jax.vmap(function)
    return jax.vmap(over_heads, in_axes=(0, 0, 0, None, None))


class PhaseSwiGLU(nn.Module):
    """SwiGLU on a token's own phases: W_out (silu(W_gate x) * W_up x) (paper, section 2, step 8).

    x is the raw angle, which depends on the representative theta or theta + 2 pi, or the lift
    psi(theta), which does not; an ablation normalises it by its root mean square.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, theta_BTD: jax.Array) -> jax.Array:
        """Returns the increment [B, T, D] before the bound."""
        config = self.config
        inputs = theta_BTD
        if config.feedforward == "lift":
            inputs = layer.phase_features(theta_BTD).astype(config.dtype)
        if config.normalization:
            inputs = nn.RMSNorm(name="norm")(inputs)
        shape = (inputs.shape[-1], config.hidden)
        lecun = nn.initializers.lecun_normal()
        gate = _angle_product(inputs, self.param("gate", lecun, shape), config.dtype)
        up = _angle_product(inputs, self.param("up", lecun, shape), config.dtype)
        out = nn.Dense(
            theta_BTD.shape[-1],
            use_bias=False,
            dtype=config.dtype,
            dot_general=kernels.dense_general,
            kernel_init=nn.initializers.variance_scaling(
                config.feedforward_scale**2, "fan_in", "truncated_normal"
            ),
            name="out",
        )
        return out(nn.silu(gate) * up).astype(theta_BTD.dtype)


def _angle_product(inputs: jax.Array, kernel: jax.Array, dtype: str) -> jax.Array:
    """Returns inputs @ kernel in the compute type without rounding angles to it.

    In bfloat16 an angle goes in as the sum of two numbers, 16 significant bits together.
    """
    kernel = kernel.astype(dtype)
    high = inputs.astype(dtype)
    product = kernels.dense(high, kernel)
    if high.dtype == inputs.dtype:
        return product
    return product + kernels.dense((inputs - high.astype(inputs.dtype)).astype(dtype), kernel)


class TanhBound(nn.Module):
    """Tanh bound on increments with a learned radius a coordinate (paper, section 2, step 7)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, increment_BTD: jax.Array) -> jax.Array:
        """Returns the bounded increment [B, T, D], in radians."""
        radius_D = self.param(
            "radius", nn.initializers.constant(self.config.radius), increment_BTD.shape[-1:]
        )
        return layer.bounded(increment_BTD, radius_D, self.config.bound)


class KuramotoBlock(nn.Module):
    """One layer: theta += bound(v a), then theta += bound(SwiGLU(theta)); no normalisation."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, theta_BTD: jax.Array, cache: LayerCache | None = None, position: jax.Array | int = 0
    ) -> tuple[jax.Array, LayerCache | None]:
        """Returns the moved phases [B, T, D] and the extended cache."""
        config = self.config
        increment_BTD, cache = KuramotoAttention(config, name="attention")(
            theta_BTD, cache, position
        )
        if config.bound != "none":
            increment_BTD = TanhBound(config, name="attention_bound")(increment_BTD)
        theta_BTD = theta_BTD + increment_BTD
        self.sow("intermediates", "after_attention", theta_BTD)
        if config.feedforward != "none":
            increment_BTD = PhaseSwiGLU(config, name="feedforward")(theta_BTD)
            if config.bound != "none":
                increment_BTD = TanhBound(config, name="feedforward_bound")(increment_BTD)
            theta_BTD = theta_BTD + increment_BTD
        return theta_BTD, cache


class PhaseReadout(nn.Module):
    """Logits by phase alignment: logit_c = scale sum_j cos(theta_j - phi_cj) + bias_c.

    phi is the embedding's phases (tied), or phases of its own.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, theta_BTD: jax.Array, phases_VD: jax.Array) -> jax.Array:
        """Returns float32 logits [B, T, V] of phases against the embedding's phases [V, D]."""
        config = self.config
        if not config.tied_readout:
            phases_VD = self.param("phases", _phase_init(config), phases_VD.shape)
        scale = self.param(
            "scale", nn.initializers.constant(config.readout_logit / config.width), ()
        )
        bias_V = self.param("bias", nn.initializers.zeros_init(), (config.symbols,))
        alignment_BTV = jax.lax.dot_general(
            layer.phase_features(theta_BTD).astype(config.dtype),
            layer.phase_features(phases_VD).astype(config.dtype),
            (((2,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return scale * alignment_BTV + bias_V[None, None, :]


def stack_blocks(block: type[nn.Module], config: ModelConfig, name: str = "blocks") -> nn.Module:
    """Returns `config.layers` blocks as one `nn.scan`, their parameters stacked on a leading axis.

    Called as `blocks(state, cache, position)` with the cache's layers leading, or None.
    """
    if config.remat:
        block = nn.remat(block, prevent_cse=False)
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),
        length=config.layers,
        unroll=min(config.unroll, config.layers),
    )(config, name=name)
