"""The walk down a draft tree: keep going while the target's own token is among the children."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchserve.sampling.sampler import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(slots=True)
class VerifiedTokens:
    """token_ids: the accepted draft tokens and then the bonus token. rows: the accepted nodes' rows, root to leaf.

    token_ids is NO_TOKEN alone where the logits behind the root say nothing.

    unverified_token_ids: the argmax behind each tree row that only its drafter wants to know of.
    """

    token_ids: list[int]
    rows: list[int]
    unverified_token_ids: tuple[int, ...] = ()


def walk_tree(
    token_ids: Sequence[int],
    parents: Sequence[int],
    root: int,
    target_token: Callable[[int, int], int],
    is_verified: Sequence[bool] = (),
) -> VerifiedTokens:
    """Verify the nodes behind row `root` (a request's last token).

    token_ids and parents are per row of the request; a node's parent is a row, `root` for the first level.
    is_verified is per tree row; empty: all are.
    target_token(row, depth) is the token that the target model puts behind that row; depth is 0 at the root. Drafts
    decide which rows exist, never what a row's token is: so the result is the same as decoding step by step.
    """
    row, emitted = root, [target_token(root, 0)]
    path: list[int] = []
    # Parents come before their children, so one pass meets the nodes of the path in order.
    for node in range(root + 1, len(parents)):
        if parents[node] != row or token_ids[node] != emitted[-1]:
            continue
        if is_verified and not is_verified[node - root - 1]:
            continue
        token = target_token(node, len(path) + 1)
        if token == NO_TOKEN:  # found again in the next step, unless the answer has ended before it
            break
        row = node
        path.append(node)
        emitted.append(token)
    return VerifiedTokens(emitted, path)
