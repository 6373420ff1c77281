"""Attention by cuDNN's fused kernels, for half precision on NVIDIA GPUs."""

import functools

import jax
import jax.numpy as jnp

DTYPES = (jnp.bfloat16, jnp.float16)


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = True
) -> jax.Array:
    """Softmax attention through `jax.nn.dot_product_attention(implementation="cudnn")`.

    Args:
      query: [B, H, T, C], scale included.
      key: [B, H, U, C].
      value: [B, H, U, C].
      causal: restricts query t to keys u <= t; without, every key is allowed.

    Returns:
      [B, H, T, C] in the type of the value.
    """
    heads_last = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    output = jax.nn.dot_product_attention(
        *heads_last, scale=1.0, is_causal=causal, implementation="cudnn"
    )
    return output.transpose(0, 2, 1, 3)


@functools.cache
def refusal(dtype: jnp.dtype, features: int) -> str:
    """Returns why cuDNN cannot attend to features [..., C] of this type here, "" where it can.

    What a cuDNN supports depends on its version and on the GPU, so the answer is found by compiling
    and running a small case, forward and backward, the first time it is asked for.
    """
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not an NVIDIA GPU"
    if dtype not in DTYPES:
        return f"cuDNN attends in bfloat16 or float16, not in {dtype}"
    with jax.ensure_compile_time_eval():
        probe = jnp.ones((1, 1, 128, features), dtype)
        try:
            slope = jax.jit(jax.grad(lambda x: jnp.sum(attention(x, x, x)).astype(jnp.float32)))
            jax.block_until_ready(slope(probe))
        except Exception as error:  # the library's own kinds, which differ between versions
            return f"cuDNN refuses {features} features of {dtype} ({str(error).splitlines()[0]})"
    return ""
