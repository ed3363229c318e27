"""Walks down a draft tree as long as the target model's own token is among the children."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from batchserve.sampling.sampler import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batchserve.types import TokenLogprobs


@dataclass(slots=True)
class VerifiedTokens:
    """token_ids: the accepted draft tokens and then the bonus token. rows: the accepted nodes' rows, root to leaf.

    token_ids is NO_TOKEN alone if the root's logits have overflowed.

    unverified_token_ids: the argmax of each unverified tree row, which only its drafter uses. logprobs: of token_ids,
    if they are asked for.
    """

    token_ids: list[int]
    rows: list[int]
    unverified_token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None  # a logits processor's; then token_ids is NO_TOKEN alone


NOT_SAMPLED = -1


@dataclass(slots=True)
class StepTokens:
    """The verified tokens of all requests of a step.

    num_accepted int64 [num_requests]: accepted draft tokens, NOT_SAMPLED where nothing was sampled. starts int64
    [num_requests]: where each request's part begins in token_ids and rows int64 [num_rows]: its accepted tokens and the
    bonus token, and the accepted nodes' rows (counted inside the request), root to leaf. A request's only token is
    NO_TOKEN where the logits after its last token say nothing. unverified_token_ids, logprobs and errors: by place; see
    VerifiedTokens. prompt_logprobs: of the tokens of RaggedBatch.prompts.
    """

    num_accepted: np.ndarray
    starts: np.ndarray
    token_ids: np.ndarray
    rows: np.ndarray
    unverified_token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    @classmethod
    def of(cls, each: Sequence[VerifiedTokens | None]) -> StepTokens:
        """Joins the verified tokens of each request; None where nothing was sampled."""
        sizes = [0 if one is None else len(one.token_ids) for one in each]
        counts = [NOT_SAMPLED if one is None else len(one.rows) for one in each]
        tokens, rows = np.zeros((2, sum(sizes)), np.int64)
        starts = np.cumsum([0, *sizes])
        for one, start in zip(each, starts.tolist(), strict=False):
            if one is not None:
                tokens[start : start + len(one.token_ids)], rows[start : start + len(one.rows)] = (
                    one.token_ids,
                    one.rows,
                )
        unverified = {
            place: one.unverified_token_ids for place, one in enumerate(each) if one and one.unverified_token_ids
        }
        logprobs = {place: one.logprobs for place, one in enumerate(each) if one and one.logprobs}
        errors = {place: one.error for place, one in enumerate(each) if one and one.error}
        found = np.array(counts, np.int64), starts[: len(each)], tokens, rows
        return cls(*found, unverified, logprobs, errors=errors)

    def __iter__(self) -> Iterator[VerifiedTokens | None]:
        return iter(self.each())

    def each(self) -> list[VerifiedTokens | None]:
        """The verified tokens of each request, None where nothing was sampled."""
        found: list[VerifiedTokens | None] = []
        tokens, rows = self.token_ids.tolist(), self.rows.tolist()
        for place, (count, start) in enumerate(zip(self.num_accepted.tolist(), self.starts.tolist(), strict=True)):
            if count == NOT_SAMPLED:
                found.append(None)
            else:
                own = tokens[start : start + count + 1], rows[start : start + count]
                more = self.unverified_token_ids.get(place, ()), self.logprobs.get(place, [])
                found.append(VerifiedTokens(*own, *more))
        return found


def walk_tree(
    token_ids: Sequence[int],
    parents: Sequence[int],
    root: int,
    target_token: Callable[[int, int], int],
    is_verified: Sequence[bool] = (),
) -> VerifiedTokens:
    """Verifies the nodes after row `root` (a request's last token).

    token_ids and parents are per row of the request; a node's parent is a row, `root` for the first level. is_verified
    is per tree row; empty: all are. target_token(row, depth) is the target model's token after that row; depth is 0 at
    the root. Drafts decide which rows exist, never what a row's token is, so the result is that of decoding step by
    step.
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
        if token == NO_TOKEN:  # computed again in the next step, unless the answer ends before it
            break
        row = node
        path.append(node)
        emitted.append(token)
    return VerifiedTokens(emitted, path)
