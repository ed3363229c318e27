"""Locust users that stream answers over gRPC, each one call after the other. Against a running server:

    locust -f load_tests/locustfile.py --host 127.0.0.1:50051                                 # the web UI
    locust -f load_tests/locustfile.py --host 127.0.0.1:50051 --headless -u 8 -r 8 -t 30s     # or in the terminal
    locust -f load_tests/locustfile.py,my_shape.py --host 127.0.0.1:50051                     # with a shape of your own

`--processes N`, `--master` and `--worker` share the users among processes. Locust counts one request for each call,
from sending it to the end of its stream; time to first token and inter-token latency are shown at the end. A stream of
a wrong shape, with wrong counts or with a non-OK status is a failure. The exit status is not 0 if a call failed, if
there was none, or if a worker was lost. `--grpc-tls` and `--grpc-tls-ca FILE` speak TLS with the server. With
`--stage-seconds`, in one process, the users walk through the stages of load_tests/stages.py instead; load_tests/run.py
does that.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Locust adds the current folder only

# Everything else is in a module: Locust loads this file under a name of its own, again if another file imports it.
from load_tests.users import GrpcUser

__all__ = ["GrpcUser"]
