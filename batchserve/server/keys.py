"""Keys of callers: a file of their hashes, with the tenant and the limits of each."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import stat
import tempfile
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from batchserve.errors import ConfigError, InvalidRequestError, PermissionDeniedError, UnauthenticatedError, one_line
from batchserve.types import MAX_PRIORITY, TENANT_BOUND, TENANT_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

PREFIX = "bs-"
HASH = re.compile(r"[0-9a-f]{64}")
MAX_FILE_BYTES = 16 << 20
NO_PRIORITY_BOUND = MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, and what it may do. A limit of None is none.

    tenant: callers of the same tenant share drafts, K/V and the counts that limits are about; "" without keys.
    max_in_flight: requests in the engine at once; more wait. max_queued: requests that may wait; more are refused.
    tokens_per_minute: of prompts and answers together. max_priority: the highest that its requests may have.
    """

    tenant: str = ""
    max_in_flight: int | None = None
    max_queued: int | None = None
    tokens_per_minute: int | None = None
    max_priority: int = 0
    is_admin: bool = False

    def check_admin(self, what: str) -> None:
        """Raises PermissionDeniedError."""
        if not self.is_admin:
            raise PermissionDeniedError(f"{what}: needs an admin's key")

    @property
    def sees_figures(self) -> bool:
        """Whether it may read the figures of the whole server: an admin, and everybody where there are no keys."""
        return self.is_admin or not self.tenant

    def check_figures(self, what: str) -> None:
        """Raises PermissionDeniedError."""
        if not self.sees_figures:
            raise PermissionDeniedError(f"{what}: needs an admin's key")

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequestError for a higher one than the caller's ceiling."""
        if priority > self.max_priority:
            bound = f"at most {self.max_priority}, the max_priority of the key"
            raise InvalidRequestError("INVALID_PRIORITY", "priority", priority, bound)


def hash_of(key: str) -> str:
    """Returns what is kept of a key. Keys are random, of 256 bits: a fast hash cannot be reversed by guessing."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def new_key() -> str:
    """Returns a new random key."""
    return PREFIX + secrets.token_urlsafe(32)


class KeyStore:
    """The keys in a file, which may be read again. Without a file everybody is the same caller.

    The file is YAML, or JSON: a list under `keys`, each with `sha256`, `tenant` and any of Caller's other fields.
    """

    def __init__(self, path: str | None, anybody: Caller) -> None:
        """anybody: who calls where there are no keys. Raises ConfigError."""
        self._path, self._anybody = path, anybody
        self._callers: dict[bytes, Caller] = {}
        if path is not None:
            self._callers = read_keys(Path(path))

    @property
    def has_keys(self) -> bool:
        return self._path is not None

    def reload(self) -> None:
        """Reads the file again. If it is not sound, the keys stay as they are, and the log says why."""
        if self._path is None:
            return
        try:
            self._callers = read_keys(Path(self._path))
        except ConfigError as error:
            logger.error("keys: not read again: %s", error)
        else:
            logger.info("keys: read again: %d", len(self._callers))

    def caller(self, authorization: str | None) -> Caller:
        """Returns who calls with this Authorization header. Raises UnauthenticatedError.

        Every hash is compared, each in constant time: how long it takes tells nothing about the keys.
        """
        if self._path is None:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError("a key is needed: Authorization: Bearer KEY")
        asked, found = hash_of(key.strip()).encode(), None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, asked):
                found = caller
        if found is None:
            raise UnauthenticatedError("the key is not known")
        return found


def read_keys(path: Path) -> dict[bytes, Caller]:
    """Returns callers by the hash of their key. Raises ConfigError, which names the key by its number."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"keys = {str(path)!r}: must have at most {MAX_FILE_BYTES} bytes")
        found = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"keys = {str(path)!r}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"keys = {str(path)!r}: must be YAML ({one_line(error)})") from None
    entries = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(entries, list) or set(found) != {"keys"}:
        raise ConfigError(f"keys = {str(path)!r}: must be a list under 'keys', and nothing else")
    callers: dict[bytes, Caller] = {}
    for i, entry in enumerate(entries):
        digest, caller = _checked(f"keys = {str(path)!r}: keys[{i}]", entry)
        if digest in callers:
            raise ConfigError(f"keys = {str(path)!r}: keys[{i}].sha256: must not be there twice")
        callers[digest] = caller
    return callers


def _checked(where: str, entry: Any) -> tuple[bytes, Caller]:
    known = {each.name for each in fields(Caller)}
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must have sha256 and tenant")
    for name in entry:
        if name not in {*known, "sha256"}:
            raise ConfigError(f"{where}.{name}: must be one of sha256, {', '.join(sorted(known))}")
    digest, tenant = entry.get("sha256"), entry.get("tenant")
    if not isinstance(digest, str) or not HASH.fullmatch(digest):
        raise ConfigError(
            f"{where}.sha256: must be 64 hexadecimal digits in lower case, as `batchserve keys` makes them"
        )
    if not isinstance(tenant, str) or not TENANT_NAME.fullmatch(tenant):
        raise ConfigError(f"{where}.tenant = {tenant!r}: must be {TENANT_BOUND}")
    given = {name: value for name, value in entry.items() if name not in ("sha256", "tenant") and value is not None}
    for name, value in given.items():
        if name == "is_admin":
            if not isinstance(value, bool):
                raise ConfigError(f"{where}.{name} = {value!r}: must be true or false")
            continue
        least, most = {
            "max_priority": (-MAX_PRIORITY, MAX_PRIORITY),
            "max_queued": (0, math.inf),
        }.get(name, (1, math.inf))
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            bound = f"{least}..{most}" if most < math.inf else f"at least {least}"
            raise ConfigError(f"{where}.{name} = {value!r}: must be an integer, {bound}")
    return digest.encode(), Caller(tenant=tenant, **given)


def add_key(path: Path, **entry: Any) -> str:
    """Makes a key, adds its hash to the file, and returns the key, which is kept nowhere. Raises ConfigError.

    Whoever else adds one at the same time waits.
    """
    key, named = new_key(), f"keys = {str(path)!r}"
    entry = {"sha256": hash_of(key), **{name: value for name, value in entry.items() if value is not None}}
    _checked(f"{named}: the new key", entry)
    target = Path(os.path.realpath(path))
    try:
        with _only_writer(target.parent):
            text = target.read_text() if target.exists() else ""
            if _content(text, named) not in (None, {"keys": None}, {"keys": []}):
                read_keys(path)  # what is not sound is not written to
            _replace(target, _with_entry(text, entry))
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written ({error.strerror})") from None
    return key


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _content(text: str, named: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{named}: must be YAML ({one_line(error)})") from None


def _with_entry(text: str, entry: dict[str, Any]) -> str:
    """Returns the text of a file with one more key: as it is, comments included, if lines can be added to its end."""
    found = yaml.safe_load(text) or {}
    wanted = {"keys": [*(found.get("keys") or []), entry]}
    if text.lstrip().startswith("{"):
        return json.dumps(wanted, indent=2) + "\n"
    comments = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    head = text.rstrip() if found.get("keys") else f"{comments}keys:"
    indent = (re.search(r"^( *)-", text, re.MULTILINE) or ("", ""))[1]
    lines = textwrap.indent(yaml.safe_dump([entry], sort_keys=False), indent)
    new = f"{head}\n{lines}"
    try:
        is_right = yaml.safe_load(new) == wanted
    except yaml.YAMLError:
        is_right = False
    return new if is_right else comments + yaml.safe_dump(wanted, sort_keys=False)


def _replace(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all. It stays readable to those who read it. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        if path.exists():
            before = path.stat()
            temporary.chmod(stat.S_IMODE(before.st_mode))
            if os.geteuid() == 0:
                os.chown(temporary, before.st_uid, before.st_gid)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
