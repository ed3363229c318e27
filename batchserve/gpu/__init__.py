"""A model's linears and norms as our own kernels, for steps of few rows on a GPU."""
