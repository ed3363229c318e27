"""Structured output: grammars that answers follow, the tokens that they allow, and those that they force."""
