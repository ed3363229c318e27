"""The processes of the other ranks: started, watched and ended by rank 0."""

from __future__ import annotations

import subprocess
import weakref
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from batchserve.engine.launch import LaunchedProcess
from batchserve.errors import ConfigError, EngineFaultError
from batchserve.parallel.messages import Built, Rank, Refused, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.config import EngineConfig

CHILD = "from batchserve.parallel.rank_process import main; main()"
END_TIMEOUT_S = 5.0
LOADING_TIMEOUT_S = 3600.0
SENDING_TIMEOUT_S = 30  # for a rank to take a message; a pipe holds little of one


class RankProcess:
    """One other rank."""

    def __init__(self, number: int) -> None:
        self.number, self.num_bytes = number, 0
        launched = LaunchedProcess(CHILD, SENDING_TIMEOUT_S)
        self.process, self.pipe = launched.process, launched.pipe

    def send(self, message: bytes) -> None:
        """Sends a message that is pickled already. Raises EngineFaultError if the rank has ended."""
        self.num_bytes += len(message)
        try:
            self.pipe.send_bytes(message)
        except BlockingIOError:
            raise self._hangs(SENDING_TIMEOUT_S) from None
        except OSError:
            raise self.ended() from None

    def receive(self, timeout_s: float) -> bytes:
        """Returns the next message. Raises EngineFaultError if the rank has ended, or says nothing for so long."""
        if not wait([self.pipe], timeout_s):
            raise self._hangs(timeout_s)
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise self.ended() from None
        self.num_bytes += len(message)
        return message

    def _hangs(self, timeout_s: float) -> EngineFaultError:
        self.process.kill()
        self.process.wait()
        return EngineFaultError(f"rank {self.number} has not answered for {timeout_s:g} s; it was ended")

    def ended(self) -> EngineFaultError:
        """Returns the error that says how the rank has ended."""
        try:
            status = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return EngineFaultError(f"rank {self.number} (process {self.process.pid}) has ended, with {how}")


class Ranks:
    """All other ranks. They end when this is closed, or forgotten, or when this process ends.

    timeout_s: a rank that says nothing for longer, in a step, hangs.
    """

    def __init__(self, count: int, timeout_s: float) -> None:
        self.each = [RankProcess(number) for number in range(1, count)]
        self._timeout_s = timeout_s
        self.close = weakref.finalize(self, _end, self.each)

    def begin(self, config: EngineConfig, cores: Sequence[tuple[int, ...]]) -> None:
        """Sends every rank what it is. They load the model at the same time. cores: of all ranks, those of each."""
        for rank in self.each:
            rank.send(packed(Rank(config, rank.number, len(self.each) + 1, cores[rank.number])))

    def wait_built(self, ours: Built) -> None:
        """Waits until every rank has its model. Raises what a rank raises, and ConfigError if one is not like ours."""
        for rank in self.each:
            theirs = unpacked(rank.receive(LOADING_TIMEOUT_S))
            if isinstance(theirs, Refused):
                raise theirs.error
            if theirs != ours:
                raise ConfigError(f"rank {rank.number}: must be like rank 0, {ours}, and is {theirs}")

    def send(self, messages: Sequence[object]) -> None:
        """Sends each rank its message of a step."""
        for rank, message in zip(self.each, messages, strict=True):
            rank.send(packed(message))

    def receive(self) -> list[Any]:
        """Returns the answer of each rank. Raises EngineFaultError if one has ended, hangs, or cannot go on."""
        answers = [unpacked(rank.receive(self._timeout_s)) for rank in self.each]
        for rank, answer in zip(self.each, answers, strict=True):
            if isinstance(answer, Refused):
                rank.process.wait(END_TIMEOUT_S)
                raise EngineFaultError(f"rank {rank.number}: {type(answer.error).__name__}: {answer.error}")
        return answers

    def check(self) -> None:
        """Raises EngineFaultError if a rank has ended."""
        for rank in self.each:
            if rank.process.poll() is not None:
                raise rank.ended()

    @property
    def num_bytes(self) -> int:
        """The bytes of all messages so far."""
        return sum(rank.num_bytes for rank in self.each)


def _end(ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        rank.pipe.close()
    for rank in ranks:
        try:
            rank.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
