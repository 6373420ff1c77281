"""Softmax attention in row blocks, with its gradient written out, for any XLA backend.

    o_t = sum_u p_tu v_u,   p_tu = exp(q_t . k_u - lse_t),   lse_t = log sum_u exp(q_t . k_u)

Rows are taken in blocks and each block's probabilities are made anew in the backward pass, so the
T x U matrix never exists: memory is O(T). Under the causal mask the rows are cut into segments that
see only the keys up to their own end, so most of what lies above the diagonal is never computed.

The gradient, with do the cotangent of o and delta_t = do_t . o_t:

    dv_u = sum_t p_tu do_t,  ds_tu = p_tu (do_t . v_u - delta_t),  dq = ds k,  dk = ds^T q

(Dao et al., arXiv:2205.14135, section 3 and appendix B, restated.)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 64
SEGMENTS = 16

Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type sums are taken in: float64 for float64, float32 for all else."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Product of two matrices of one type over one axis of each, accumulated in at least float32.

    Float32 products are asked for at full precision, which backends with faster, coarser float32
    products do not give by default.
    """
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=accumulation_dtype(a.dtype),
    )


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    causal: bool = False,
) -> jax.Array:
    """Softmax attention of one head: softmax(q k^T) v over the allowed keys.

    Args:
      query: [T, C], scale included.
      key: [U, C].
      value: [U, E].
      mask: [T, U] boolean, True = may attend; None allows every key.
      causal: restricts query t to keys u <= t instead of `mask`; needs T = U.

    Returns:
      [T, E] in at least float32. A row with nothing to attend to is zero, in value and gradient.
    """
    return _attention(query, key, value, mask, causal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, causal: bool
) -> jax.Array:
    return _forward(query, key, value, mask, causal)[0]


def _allowed(
    mask: jax.Array | None, causal: bool, first_row: jax.Array | int, rows: int, keys: int
) -> jax.Array | None:
    """The [rows, keys] part of the mask that belongs to a block, or None where all is allowed."""
    if causal:
        row = lax.broadcasted_iota(jnp.int32, (rows, keys), 0) + first_row
        return lax.broadcasted_iota(jnp.int32, (rows, keys), 1) <= row
    return None if mask is None else lax.dynamic_slice_in_dim(mask, first_row, rows, 0)[:, :keys]


def _segments(length: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """Row segments (first row, rows, keys they may see); each is a whole number of blocks.

    The last segment takes the rows that are left, fewer than a block where `length` is no multiple.
    """
    if not causal:
        whole = length - length % BLOCK
        return [part for part in [(0, whole, keys), (whole, length - whole, keys)] if part[1]]
    blocks = length // BLOCK
    step = BLOCK * max(1, -(-blocks // SEGMENTS))
    starts = list(range(0, blocks * BLOCK, step))
    parts = [(start, min(step, blocks * BLOCK - start)) for start in starts]
    if length % BLOCK:
        parts.append((blocks * BLOCK, length % BLOCK))
    return [(start, rows, start + rows) for start, rows in parts]


def _over_blocks(body: Callable, carry: Any, first: int, rows: int) -> tuple[Any, Any]:
    """Runs `body(carry, first_row, block_rows)` over the blocks of a segment.

    Returns the last carry and the outputs joined along the row axis.
    """
    if rows <= BLOCK:
        return body(carry, first, rows)
    starts = first + BLOCK * jnp.arange(rows // BLOCK, dtype=jnp.int32)
    carry, stacked = lax.scan(lambda c, start: body(c, start, BLOCK), carry, starts)
    joined = jax.tree.map(lambda x: x.reshape((rows, *x.shape[2:])), stacked)
    return carry, joined


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [T, E] and lse [T] (infinite for rows with nothing to attend to)."""
    outputs, sums = [], []
    for first, rows, keys in _segments(query.shape[0], key.shape[0], causal):

        def block(carry: None, first_row: jax.Array, rows: int, keys: int = keys) -> tuple:
            query_RC = lax.dynamic_slice_in_dim(query, first_row, rows, 0)
            score_RU = dot(query_RC, key[:keys], (1, 1))
            allowed_RU = _allowed(mask, causal, first_row, rows, keys)
            if allowed_RU is not None:
                score_RU = jnp.where(allowed_RU, score_RU, -jnp.inf)
            top_R = jnp.max(score_RU, axis=1)
            top_R = jnp.where(jnp.isfinite(top_R), top_R, 0.0)
            weight_RU = jnp.exp(score_RU - top_R[:, None])
            total_R = jnp.sum(weight_RU, axis=1)
            output_RE = dot(weight_RU.astype(value.dtype), value[:keys])
            output_RE = output_RE / jnp.where(total_R > 0.0, total_R, 1.0)[:, None]
            # An infinite normaliser makes every probability of an empty row zero.
            lse_R = jnp.where(total_R > 0.0, top_R + jnp.log(total_R), jnp.inf)
            return carry, (output_RE, lse_R)

        _, (output, lse) = _over_blocks(block, None, first, rows)
        outputs.append(output)
        sums.append(lse)
    return jnp.concatenate(outputs), jnp.concatenate(sums)


def _attention_fwd(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, causal: bool
) -> tuple[jax.Array, Residuals]:
    output, lse = _forward(query, key, value, mask, causal)
    return output, (query, key, value, mask, output, lse)


def _attention_bwd(
    causal: bool, residuals: Residuals, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, mask, output, lse = residuals
    delta = jnp.sum(cotangent * output, axis=1)
    narrow_cotangent = cotangent.astype(value.dtype)
    wide = output.dtype
    dkey, dvalue = jnp.zeros(key.shape, wide), jnp.zeros(value.shape, wide)
    dqueries = []
    for first, rows, keys in _segments(query.shape[0], key.shape[0], causal):

        def block(carry: tuple, first_row: jax.Array, rows: int, keys: int = keys) -> tuple:
            dkey_UC, dvalue_UE = carry
            cut = functools.partial(
                lax.dynamic_slice_in_dim, start_index=first_row, slice_size=rows, axis=0
            )
            query_RC, cotangent_RE = cut(query), cut(narrow_cotangent)
            score_RU = dot(query_RC, key[:keys], (1, 1))
            weight_RU = jnp.exp(score_RU - cut(lse)[:, None])
            allowed_RU = _allowed(mask, causal, first_row, rows, keys)
            if allowed_RU is not None:
                weight_RU = jnp.where(allowed_RU, weight_RU, 0.0)
            dweight_RU = dot(cotangent_RE, value[:keys], (1, 1))
            dscore_RU = (weight_RU * (dweight_RU - cut(delta)[:, None])).astype(key.dtype)
            dvalue_UE += dot(weight_RU.astype(value.dtype), cotangent_RE, (0, 0))
            dkey_UC += dot(dscore_RU, query_RC, (0, 0))
            return (dkey_UC, dvalue_UE), dot(dscore_RU, key[:keys])

        (dkey_seen, dvalue_seen), dquery = _over_blocks(
            block, (dkey[:keys], dvalue[:keys]), first, rows
        )
        dkey = lax.dynamic_update_slice_in_dim(dkey, dkey_seen, 0, 0)
        dvalue = lax.dynamic_update_slice_in_dim(dvalue, dvalue_seen, 0, 0)
        dqueries.append(dquery)
    dquery = jnp.concatenate(dqueries)
    return dquery.astype(query.dtype), dkey.astype(key.dtype), dvalue.astype(value.dtype), None


_attention.defvjp(_attention_fwd, _attention_bwd)
