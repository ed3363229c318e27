"""Tools for benchmarks; they are not part of the installed package."""
