"""A CPU's step as one native program: the model traced, lowered to a list of operations, and run in one call."""
