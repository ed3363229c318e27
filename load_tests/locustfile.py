"""Locust users that stream answers, each one call after the other. Against a running server:

    locust -f load_tests/locustfile.py --host http://127.0.0.1:8000                           # HTTP, with the web UI
    locust -f load_tests/locustfile.py --host 127.0.0.1:50051                                 # gRPC
    locust -f load_tests/locustfile.py --host 127.0.0.1:50051 --headless -u 8 -r 8 -t 30s     # in the terminal
    locust -f load_tests/locustfile.py --host 127.0.0.1:50051 --headless -u 16 --shape steps
    locust -f load_tests/locustfile.py,my_shape.py --host 127.0.0.1:50051                     # with a shape of your own

docs/load_testing.md has the options. Locust counts one request for each call, from sending it to the end of its stream.
A stream of a wrong shape, with wrong counts or with an error status is a failure. The exit status is not 0 if a call
failed, if there was none, or if a worker was lost.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Locust adds the current folder only

# Everything else is in modules: Locust loads this file under a name of its own, again if another file imports it.
import load_tests.options
import load_tests.preparation  # noqa: F401 - both listen to Locust's events
from load_tests.users import GrpcUser, HttpUser

__all__ = ["GrpcUser", "HttpUser"]
