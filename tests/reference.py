"""The layer in float64 NumPy with explicit loops, written from the formulas of the paper.

Nothing of the package is imported here and nothing is vectorised across tokens or
coordinates, so that a mistake in the fast code has no way of being repeated. Tokens are
``t`` (updated) and ``u`` (attended to), ``j`` is a coordinate, ``k`` their number.
"""

import cmath
import math

import numpy as np


def random_inputs(tokens, width, seed=0):
    """Random arguments of the layer in float64: theta, gate_q, gate_k, tau, omega."""
    rng = np.random.default_rng(seed)
    theta = rng.uniform(-4.0, 4.0, (tokens, width))
    gate_q, gate_k = rng.uniform(0.2, 2.0, (2, tokens, width))
    gate_q /= gate_q.mean(axis=-1, keepdims=True)
    gate_k /= gate_k.mean(axis=-1, keepdims=True)
    return theta, gate_q, gate_k, np.float64(2.5), rng.uniform(-1.5, 1.5, width)


def phase_features(theta):
    """Lift: psi(theta) = (cos theta, sin theta), all cosines before all sines."""
    theta = np.asarray(theta, np.float64)
    out = np.zeros((*theta.shape[:-1], 2 * theta.shape[-1]))
    for index in np.ndindex(theta.shape):
        *row, j = index
        out[(*row, j)] = math.cos(theta[index])
        out[(*row, theta.shape[-1] + j)] = math.sin(theta[index])
    return out


def normalized_gate(preactivation):
    """Step 1: rho(x)_j = softplus(x_j) / ((1/k) sum_i softplus(x_i))."""
    x = np.asarray(preactivation, np.float64)
    out = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        soft = [max(v, 0.0) + math.log1p(math.exp(-abs(v))) for v in x[row]]
        mean = sum(soft) / len(soft)
        out[row] = [v / mean for v in soft]
    return out


def gate(theta, weight, bias):
    """Step 1: g_t = rho(W psi(theta_t) + b), W of shape [2k, k] acting from the right."""
    return normalized_gate(phase_features(theta) @ np.asarray(weight) + np.asarray(bias))


def phase_score(theta_q, theta_k, gate_q, gate_k, tau, omega, positions_q, positions_k):
    """Step 2: s_{t,u} = (tau / sqrt k) sum_j g^q_{t,j} g^k_{u,j} cos(c_{t,u,j}).

    The angle is c_{t,u,j} = theta_{t,j} - theta_{u,j} + omega_j (t - u), where t - u is the
    difference of the positions of the two tokens.
    """
    rows, width = np.shape(theta_q)
    cols = np.shape(theta_k)[0]
    out = np.zeros((rows, cols))
    for t in range(rows):
        for u in range(cols):
            lag = int(positions_q[t]) - int(positions_k[u])
            total = 0.0
            for j in range(width):
                angle = float(theta_q[t][j]) - float(theta_k[u][j]) + float(omega[j]) * lag
                total += float(gate_q[t][j]) * float(gate_k[u][j]) * math.cos(angle)
            out[t, u] = float(tau) / math.sqrt(width) * total
    return out


def attention_weights(score, mask=None):
    """Step 3: A_{t,u} = exp(s_{t,u}) / sum over allowed u; a row with none is zero."""
    rows, cols = np.shape(score)
    out = np.zeros((rows, cols))
    for t in range(rows):
        allowed = [u for u in range(cols) if mask is None or mask[t][u]]
        if not allowed:
            continue
        top = max(float(score[t][u]) for u in allowed)
        terms = {u: math.exp(float(score[t][u]) - top) for u in allowed}
        total = math.fsum(terms.values())
        for u, term in terms.items():
            out[t, u] = term / total
    return out


def circular_mean(weights, theta_k):
    """Step 4: G_{t,j} = sum_u A_{t,u} exp(i theta_{u,j})."""
    rows, cols = np.shape(weights)
    width = np.shape(theta_k)[1]
    out = np.zeros((rows, width), np.complex128)
    for t in range(rows):
        for u in range(cols):
            for j in range(width):
                out[t, j] += float(weights[t][u]) * cmath.exp(1j * float(theta_k[u][j]))
    return out


def tangent_update(theta_q, resultant):
    """Step 5: a_{t,j} = -sin(theta_{t,j}) Re G_{t,j} + cos(theta_{t,j}) Im G_{t,j}."""
    out = np.zeros(np.shape(theta_q))
    for t, j in np.ndindex(out.shape):
        angle, mean = float(theta_q[t][j]), complex(resultant[t][j])
        out[t, j] = -math.sin(angle) * mean.real + math.cos(angle) * mean.imag
    return out


def kuramoto_coupling(weights, theta_q, theta_k):
    """Proposition 1: a_{t,j} = sum_u A_{t,u} sin(theta_{u,j} - theta_{t,j})."""
    rows, cols = np.shape(weights)
    out = np.zeros(np.shape(theta_q))
    for t in range(rows):
        for u in range(cols):
            for j in range(out.shape[1]):
                lead = float(theta_k[u][j]) - float(theta_q[t][j])
                out[t, j] += float(weights[t][u]) * math.sin(lead)
    return out


def coherence(weights_row, theta_t, theta_k):
    """Lemma 3: sum_u A_{t,u} sum_j cos(theta_{u,j} - theta_{t,j}) for one token t."""
    total = 0.0
    for weight, theta_u in zip(weights_row, theta_k, strict=True):
        for angle_u, angle_t in zip(theta_u, theta_t, strict=True):
            total += float(weight) * math.cos(float(angle_u) - float(angle_t))
    return total


def free_energy(weights_row, score_row):
    """Proposition 2: sum_u A_u s_u + H(A), with H(A) = -sum_u A_u log A_u and 0 log 0 = 0."""
    total = 0.0
    for weight, score in zip(weights_row, score_row, strict=True):
        weight = float(weight)
        total += weight * float(score) - (weight * math.log(weight) if weight > 0 else 0.0)
    return total


def order_parameter(theta):
    """Mean phasor (1/N) sum_n exp(i theta_n) of a list of angles."""
    return sum(cmath.exp(1j * float(angle)) for angle in theta) / len(theta)


def allowed(mask, tokens):
    """Return the boolean [T, T] table of a mask: "causal" is u <= t, "full" everything."""
    if isinstance(mask, str):
        rule = {"causal": lambda t, u: u <= t, "full": lambda t, u: True}[mask]
        return np.array([[rule(t, u) for u in range(tokens)] for t in range(tokens)])
    return np.asarray(mask, bool)


def kuramoto_attention(theta, gate_q, gate_k, tau, omega, positions=None, mask="causal"):
    """Chain steps 2 to 5: score, weights, resultant, tangent component."""
    tokens = len(theta)
    where = range(tokens) if positions is None else positions
    score = phase_score(theta, theta, gate_q, gate_k, tau, omega, where, where)
    weights = attention_weights(score, allowed(mask, tokens))
    return tangent_update(theta, circular_mean(weights, theta))


def bounded(increment, radius, kind="coordinate"):
    """Bound an increment x with radius r.

    coordinate: r_j tanh(x_j); norm: r_j tanh(rms(x)) x_j / rms(x), which is 0 at x = 0,
    with rms(x) = sqrt((1/k) sum_j x_j^2).
    """
    x = np.asarray(increment, np.float64)
    r = np.broadcast_to(np.asarray(radius, np.float64), x.shape)
    out = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        if kind == "coordinate":
            out[index] = r[index] * math.tanh(x[index])
        elif kind == "norm":
            row = x[index[:-1]]
            rms = math.sqrt(sum(v * v for v in row) / len(row))
            out[index] = r[index] * math.tanh(rms) * x[index] / rms if rms > 0 else 0.0
        else:
            raise ValueError(kind)
    return out


def attention_step(theta, attraction, weight, bias, radius, kind="coordinate"):
    """Apply steps 6 and 7: theta_t + bound(v(theta_t) a_t), v = W_v psi(theta_t) + b.

    The weight is [2k, k], from the right, and gives one signed scalar a coordinate.
    """
    value = phase_features(theta) @ np.asarray(weight) + np.asarray(bias)
    return np.asarray(theta) + bounded(value * np.asarray(attraction), radius, kind)


def swiglu(x, weight_gate, weight_up, weight_down):
    """Evaluate the map of step 8: (silu(x W_gate) * (x W_up)) W_down.

    Here silu(y) = y / (1 + e^-y). In the paper x is the raw angle; the geometry-native
    variant passes psi(theta) as x.
    """
    hidden = np.asarray(x, np.float64) @ np.asarray(weight_gate)
    for index in np.ndindex(hidden.shape):
        hidden[index] = hidden[index] / (1.0 + math.exp(-hidden[index]))
    return (hidden * (np.asarray(x) @ np.asarray(weight_up))) @ np.asarray(weight_down)


def feed_forward_step(theta, weights, radius, kind="coordinate"):
    """Step 8: theta_t + bound(SwiGLU(theta_t)), ``weights`` as (gate, up, down)."""
    return np.asarray(theta) + bounded(swiglu(theta, *weights), radius, kind)


def rms_norm(x, scale, epsilon=1e-6):
    """Baseline: x_j scale_j / sqrt((1/k) sum_i x_i^2 + epsilon), over the last axis."""
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        square = sum(v * v for v in x[row]) / x.shape[-1]
        out[row] = [v * s / math.sqrt(square + epsilon) for v, s in zip(x[row], scale, strict=True)]
    return out


def rope_attention(query, key, value, rates, mask="causal"):
    """Baseline: softmax attention of one head with rotary positions.

    Coordinates p and p + k/2 form the complex number q_p; the score is
    (1 / sqrt k) sum_p Re(q_{t,p} conj(k_{u,p}) exp(i rate_p (t - u))).
    """
    tokens, width = np.shape(query)
    half = width // 2
    score = np.zeros((tokens, tokens))
    for t in range(tokens):
        for u in range(tokens):
            for p in range(half):
                q = complex(query[t][p], query[t][p + half])
                k = complex(key[u][p], key[u][p + half])
                turned = q * k.conjugate() * cmath.exp(1j * float(rates[p]) * (t - u))
                score[t, u] += turned.real / math.sqrt(width)
    return attention_weights(score, allowed(mask, tokens)) @ np.asarray(value, np.float64)
