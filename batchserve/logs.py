"""What a process logs, and how."""

from __future__ import annotations

import logging
import sys


def configure_logging() -> None:
    """To standard error, from INFO on."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
