"""Commands that train, score and show the language models of `kuramoto_jax`."""
