"""The walk down a draft tree: keep going while the target's own token is among the children."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """token_ids: the accepted draft tokens and then the bonus token. rows: the accepted nodes' rows, root to leaf."""

    token_ids: list[int]
    rows: list[int]


def walk_tree(
    token_ids: Sequence[int], parents: Sequence[int], root: int, target_token: Callable[[int, int], int]
) -> VerifiedTokens:
    """Verify the nodes behind row `root` (a request's last token).

    token_ids and parents are per row of the request; a node's parent is a row, `root` for the first level.
    target_token(row, depth) is the token that the target model puts behind that row; depth is 0 at the root. Drafts
    decide which rows exist, never what a row's token is: so the result is the same as decoding step by step.
    """
    children: dict[tuple[int, int], int] = {}
    for row in range(root + 1, len(parents)):
        children[parents[row], token_ids[row]] = row
    emitted: list[int] = []
    path: list[int] = []
    row = root
    while True:
        token = target_token(row, len(path))
        emitted.append(token)
        child = children.get((row, token))
        if child is None:
            return VerifiedTokens(emitted, path)
        path.append(child)
        row = child
