"""The output of a batch: a line for each request, which a later run can go on with."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from batchserve.errors import ConfigError, shortened
from batchserve.files import check_writable

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

BUSY = (429, 503)  # a later run asks again
BEGIN = b'{"id":"batch_req_'


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcome of one request: a response of any status, or no response and the reason."""

    custom_id: str
    status_code: int = 0
    request_id: str = ""
    body: Any = None
    error: str = ""

    @property
    def is_answered(self) -> bool:
        return 200 <= self.status_code < 300

    def line(self) -> bytes:
        """Returns the line of the output."""
        response = {"status_code": self.status_code, "request_id": self.request_id, "body": self.body}
        fields = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": None if self.error else response,
            "error": {"code": "request_failed", "message": self.error} if self.error else None,
        }
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"


class ResultFile:
    """An output that lines are appended to; a context manager. Two processes cannot write to one at once."""

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.realpath(path))

    def __enter__(self) -> Self:
        """Raises ConfigError."""
        check_writable(self._path, "OUTPUT")
        if self._path.exists() and not self._path.is_file():
            raise ConfigError(f"OUTPUT = {str(self._path)!r}: must be a regular file")
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def resume(self, custom_ids: Iterable[str]) -> dict[str, bool]:
        """Returns the requests that have a response, and whether it is an answer. custom_ids: those of the input.

        What a killed run left is repaired: a torn last line is cut off. Lines without a response, or with one of a
        server that was too busy, are taken out: their requests are to be asked again. Raises ConfigError for any other
        line that is not a result of this input.
        """
        known = set(custom_ids)
        lines = self._path.read_bytes().split(b"\n")
        torn = lines.pop()
        kept: list[bytes] = []
        answered: dict[str, bool] = {}
        for number, line in enumerate(lines, 1):
            custom_id, status = self._parsed(line, f"{self._path} line {number}")
            if custom_id not in known:
                raise ConfigError(
                    f"{self._path} line {number}: custom_id {shortened(custom_id)} is not in the input; is this the "
                    "output of another batch?"
                )
            if custom_id in answered:
                raise ConfigError(f"{self._path} line {number}: custom_id {shortened(custom_id)} comes twice")
            if status is not None and status not in BUSY:
                kept.append(line)
                answered[custom_id] = 200 <= status < 300
        if torn and not (torn.startswith(BEGIN) or BEGIN.startswith(torn)):
            raise ConfigError(f"{self._path} line {len(lines) + 1}: is not a line of a batch's output")
        if torn or len(kept) < len(lines):
            self._rewrite(kept)
        return answered

    def add(self, result: BatchResult) -> None:
        """Appends a line, and hands it to the system before it returns. Raises ConfigError if that fails."""
        line = memoryview(result.line())
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}") from error

    def _open(self) -> None:
        try:
            self._file: BinaryIO = self._path.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{self._path}: another process is writing to it") from None
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}") from error

    def _parsed(self, line: bytes, where: str) -> tuple[str, int | None]:
        """Returns the custom_id and the status of a line; None without a response. Raises ConfigError."""
        try:
            fields = json.loads(line)
            response = fields["response"]
            return str(fields["custom_id"]), None if response is None else int(response["status_code"])
        except (ValueError, TypeError, LookupError, RecursionError):
            raise ConfigError(f"{where}: is not a line of a batch's output") from None

    def _rewrite(self, lines: list[bytes]) -> None:
        """Leaves only these lines. A crash meanwhile leaves the file as it was, or as it will be."""
        made, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            with open(made, "wb") as file:
                file.write(b"".join(line + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, self._path.stat().st_mode & 0o7777)
            os.replace(name, self._path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(name)
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._file.close()
        self._open()
