"""Runs a CPU step as one native program: the model is traced, lowered to a list of operations and run in one call."""
