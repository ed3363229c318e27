"""Starts the process of an engine. Nothing heavy is imported, so that it can begin before anything else does."""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
from multiprocessing.connection import Connection
from typing import Any

from batchserve.interpreter import python
from batchserve.logs import log_format

CHILD = "from batchserve.engine.engine_subprocess import main; main()"


class LaunchedProcess:
    """A process that imports what an engine needs, and waits for its configuration.

    code: what it runs; an engine by default. send_timeout_s: writing to its pipe raises BlockingIOError after so long.
    """

    def __init__(self, code: str = CHILD, send_timeout_s: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        if send_timeout_s is not None:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", send_timeout_s, 0))
        with theirs:
            level = logging.getLogger("batchserve").getEffectiveLevel()
            self.process = subprocess.Popen(
                python(code, str(theirs.fileno()), str(level), log_format()),
                stdin=subprocess.DEVNULL,
                stdout=2,  # all of its output goes to standard error
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the front end only
            )
        self.pipe: Connection[Any, Any] = Connection(ours.detach())

    def end(self) -> None:
        """Ends the process if it still runs."""
        self.process.kill()
        self.process.wait()
        if not self.pipe.closed:
            self.pipe.close()
