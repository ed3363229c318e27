"""`python -m batchserve`: runs the command line where its script is not on the path."""

import sys

from batchserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
