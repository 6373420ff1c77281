"""Strict JAX for every test: several CPU devices, no implicit promotion of ranks or types."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
