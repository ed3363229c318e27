"""`batchserve keys`: makes keys for callers, and the file of their hashes that `serve --keys` reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


def add_keys_parser(commands: Any) -> None:
    """Adds the command."""
    keys = commands.add_parser("keys", help="make a key for a caller")
    keys.add_argument("file", type=Path, metavar="FILE.yaml", help="the file to add the key's hash to")
    keys.add_argument("--tenant", required=True, metavar="NAME", help="callers of a tenant share drafts and K/V")
    keys.add_argument("--max-in-flight", type=int, metavar="N", help="requests at once; more wait (default: no limit)")
    keys.add_argument("--max-queued", type=int, metavar="N", help="requests that may wait so (default: 256)")
    keys.add_argument("--tokens-per-minute", type=int, metavar="N", help="of prompts and answers (default: no limit)")
    keys.add_argument("--max-priority", type=int, metavar="N", help="the highest priority of a request (default: 0)")
    keys.add_argument("--admin", dest="is_admin", action="store_true", help="may read metrics and drain the server")
    keys.set_defaults(run=run_keys)


def run_keys(arguments: argparse.Namespace) -> int:
    """Prints a new key, which is kept nowhere, and adds its hash to the file."""
    from batchserve.server.keys import add_key

    names = ("tenant", "max_in_flight", "max_queued", "tokens_per_minute", "max_priority")
    entry = {name: getattr(arguments, name) for name in names}
    print(add_key(arguments.file, **entry, is_admin=arguments.is_admin or None))
    return 0
