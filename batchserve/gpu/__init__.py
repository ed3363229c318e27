"""A model's linears and norms as kernels of our own, for steps of few rows on a GPU."""
