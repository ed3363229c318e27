"""Everything that needs a GPU, in one command: see README.md beside this file, and run.py."""
