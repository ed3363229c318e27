"""Compiled part of the mixture drafter that learns the experts' weights from accepted tokens."""

# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

from batchserve.draft.mixture_kernels import (
    MAX_SHARE,
    MIN_SHARE,
    MIN_VISITS,
    OWN,
    SCOPE,
    begin,
    clear,
    find_at_root,
    read_recent,
    spread,
    weigh,
)
from batchserve.draft.mixture_noise import merit_of_noise
from batchserve.draft.text_index import append_tokens
from batchserve.native.jit import njit
from batchserve.sampling.draw_kernel import stream_key

SLOWEST_RATE, FIRST_RATE = 0.006, 12.0
# After RIPE updates in all, the weights have settled. A drafted step then learns from its first token, for which the
# draft has looked everything up, and from one in ONE_IN of the others. Those need a lookup of their own, which takes
# longer than all the rest.
RIPE, ONE_IN = 8192, 32


@njit(cache=True, nogil=True)
def accept_tokens(  # type: ignore[no-untyped-def]
    own, scope, token_ids, num_output, noise, weights, seen, root, is_root_known, nodes, scratch, max_learned
):
    """Appends token_ids (int32) to the own text, and learns weights from some of the last max_learned of them.

    The last num_output tokens of the own text are the answer. root: NODE [1]. If is_root_known, it holds what a draft
    found for the current end of the text, so the first token is learned from the evidence that it was drafted by. Work
    memory: nodes NODE [at least 1], scratch SCRATCH [1], zeros at first.
    """
    noise_bin, seed, position = noise
    node, work = root[0], scratch[0]
    is_ripe, count = is_root_known and seen.sum() >= RIPE, token_ids.shape[0]
    for i in range(count):
        if i >= count - max_learned and (i == 0 or not is_ripe or (num_output + i) % ONE_IN == 0):
            if i > 0 or not is_root_known:
                node = nodes[0]
                node.at[OWN] = work.room
                read_recent(own, num_output + i, work.recent)
                find_at_root(own, MIN_VISITS, node, OWN, work)
                find_at_root(scope, MIN_VISITS, node, SCOPE, work)
            _learn(token_ids[i], weights, seen, node, work)
            if noise_bin >= 0:
                key = stream_key(seed, position + i)
                _learn_noise(noise_bin, key, token_ids[i], weights, seen, node, work)
        append_tokens(own[0], own[1], own[2], own[3], token_ids[i : i + 1], 0)


@njit(cache=True, nogil=True)
def _learn(target, weights, seen, node, work):  # type: ignore[no-untyped-def]
    """Runs one step of expectation-maximisation, which credits each expert with its part of `target`'s probability."""
    begin(work)
    weigh(node, work, weights, 0.0, target)
    prob = 1e-5  # of a token that no expert knows
    for i in range(work.num_experts - 1, -1, -1):
        work.below[i] = prob
        share = weights[work.bins[i]]
        prob = share * work.target_probs[i] + (1.0 - share) * prob
    left = 1.0
    for i in range(work.num_experts):
        at = work.bins[i]
        share = weights[at]
        merit = share * work.target_probs[i] / (share * work.target_probs[i] + (1.0 - share) * work.below[i])
        seen[at] += 1
        rate = max(SLOWEST_RATE, 1.0 / (seen[at] + FIRST_RATE - 1.0))
        weights[at] = min(MAX_SHARE, max(MIN_SHARE, share + rate * left * (merit - share)))
        left *= 1.0 - merit
        if left < 1e-3:
            break


@njit(cache=True, nogil=True)
def _learn_noise(noise_bin, key, target, weights, seen, node, work):  # type: ignore[no-untyped-def]
    """Does the same for the noise's weight, with the experts that _learn has just asked."""
    clear(work)
    spread(node, work)
    merit = merit_of_noise(work, key, weights[noise_bin], target)
    if merit >= 0.0:
        seen[noise_bin] += 1
        rate = max(SLOWEST_RATE, 1.0 / (seen[noise_bin] + FIRST_RATE - 1.0))
        weights[noise_bin] = min(MAX_SHARE, max(MIN_SHARE, weights[noise_bin] + rate * (merit - weights[noise_bin])))
