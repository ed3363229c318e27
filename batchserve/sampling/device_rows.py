"""sampler.sample_row for many rows at once, on the device: the same token, or NEEDS_HOST if it is not proven.

An exact draw is slow because it takes float64 over the whole vocabulary. So float32 scores, whose error is bounded,
select the few tokens that may win, and float64 decides between them. A row is NEEDS_HOST if the bound does not rule out
every other token, if two scores are closer than the rounding of a logarithm, or if top_k or top_p reach further down
than the candidates. No shape and no branch depends on a value, so the whole can be captured or compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from batchserve.sampling.device_noise import draws, gumbel, gumbel_fp32
from batchserve.sampling.draw_kernel import NEGLIGIBLE_NATS

NEEDS_HOST = -2  # not a token: sampler.sample_row has to compute it on the host

NUM_FINALISTS = 3
# Bounds the error of a float32 score within the noise's range of the top. It is below 5e-5 (a quotient of up to 30 with
# three roundings, the noise, their sum), and compiled kernels' fast logarithms stay below twice that.
FP32_SLACK = 1e-3
# Float64 errors: of a score of moderate size (two logarithms, either library), and relative to the top processed logit.
FP64_SLACK = 2.0**-40
FP64_RELATIVE_SLACK = 2.0**-50
# Outside these, float32 cannot hold the temperature, or float64 cannot tell all processed logits apart.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-30, 1e30


class RowParams(NamedTuple):
    """Each row's sampling parameters, all [num_rows]: int64 keys (noise.stream_key) and top_k, float64 the others."""

    keys: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


def sample_rows(logits: torch.Tensor, params: RowParams, num_candidates: int) -> torch.Tensor:
    """Returns int64 [num_rows]: sample_row's token of each row, or NEEDS_HOST.

    logits: [num_rows, vocab_size] of any float type. If a row's greatest logit is not finite, its result is arbitrary.
    num_candidates: how many tokens top_k and top_p may keep before a row needs the host; 0: no row has them.
    """
    values = logits.float()
    top = values.amax(dim=-1, keepdim=True)
    temperature = params.temperature.unsqueeze(1)
    is_sure = (params.temperature >= LOWEST_TEMPERATURE) & (params.temperature <= HIGHEST_TEMPERATURE)
    everyone = torch.arange(logits.shape[1], device=logits.device)
    scores = (values - top) / temperature.float() + gumbel_fp32(draws(params.keys.unsqueeze(1), everyone))
    if num_candidates > 0:
        edge, is_edge_sure = _edge(logits, params, num_candidates)
        is_sure = is_sure & is_edge_sure
        scores = scores.masked_fill(~(values >= edge), -torch.inf)

    finalists, estimates = [], []
    for _ in range(NUM_FINALISTS):
        estimate, token = scores.max(dim=-1, keepdim=True)
        scores = scores.scatter_(1, token, -torch.inf)
        finalists.append(token)
        estimates.append(estimate)
    token_ids = torch.cat(finalists, dim=1)
    exact = values.gather(1, token_ids).double() / temperature + gumbel(draws(params.keys.unsqueeze(1), token_ids))
    # If fewer tokens are allowed than there are finalists, the last finalists are not allowed tokens.
    exact = exact.masked_fill(~(torch.cat(estimates, dim=1) > -torch.inf), -torch.inf)
    best, place = exact.max(dim=-1, keepdim=True)
    second = exact.scatter(1, place, -torch.inf).amax(dim=-1, keepdim=True)

    top_processed = top.double() / temperature
    rounding = top_processed.abs() * FP64_RELATIVE_SLACK
    others = scores.amax(dim=-1, keepdim=True).double() + top_processed + (FP32_SLACK + rounding)
    is_proven = (others < best) & (best - second > FP64_SLACK + rounding)
    winner = token_ids.gather(1, place).squeeze(1)
    return winner.masked_fill(~(is_sure & is_proven.squeeze(1)), NEEDS_HOST)


def _edge(logits: torch.Tensor, params: RowParams, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (float32 [num_rows, 1] lowest logit that top_k and top_p keep, bool [num_rows] whether that is certain).

    The definition is that of logits.allowed_tokens: ties with the edge are kept. Only the largest `num_candidates`
    logits are sorted; the nucleus's total needs all of them, but in no order.
    """
    vocab_size = logits.shape[1]
    count = min(num_candidates, vocab_size)
    largest = logits.topk(count).values.float()
    temperature = params.temperature.unsqueeze(1)
    top_k, top_p = params.top_k.unsqueeze(1), params.top_p.unsqueeze(1)
    processed = largest.double() / temperature
    best = processed[:, :1]
    negligible = best - NEGLIGIBLE_NATS

    is_k_inside = (top_k > 0) & (top_k <= count)
    edge = largest.gather(1, (top_k - 1).clamp(0, count - 1)).masked_fill(~is_k_inside, -torch.inf)
    # A larger top_k cuts nothing off if the candidates include all tokens that are not negligible.
    is_sure = (top_k == 0) | is_k_inside | (processed[:, -1:] < negligible)
    if count == vocab_size:
        is_sure = torch.ones_like(is_sure)

    def masses(values: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        is_in = (scaled >= negligible) & (values >= edge)
        return torch.exp(scaled - best).masked_fill(~is_in, 0.0)

    everyone = logits.float()
    total = masses(everyone, everyone.double() / temperature).sum(dim=-1, keepdim=True)
    cumulative = masses(largest, processed).cumsum(dim=-1)
    # Sums of the same exponentials, computed in another order or by other code, differ by at most this. The edge is
    # certain if it is the same at both ends of that range.
    slack = total * (vocab_size * 2.0**-52)
    first = (cumulative < top_p * total - slack).sum(dim=-1, keepdim=True)
    last = (cumulative < top_p * total + slack).sum(dim=-1, keepdim=True)
    nucleus_edge = largest.gather(1, first.clamp(max=count - 1))
    is_nucleus_sure = (last < count) & (nucleus_edge == largest.gather(1, last.clamp(max=count - 1)))
    has_nucleus = top_p < 1.0
    return torch.where(has_nucleus, nucleus_edge, edge), (is_sure & (~has_nucleus | is_nucleus_sure)).squeeze(1)
