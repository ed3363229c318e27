"""A launched step on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchserve.runner.step_handle import prompt_logprobs, verify_request
from batchserve.sampling.sampler import RowSampler
from batchserve.sampling.verify import StepTokens, VerifiedTokens

if TYPE_CHECKING:
    import numpy as np

    from batchserve.runner.ragged_batch import RaggedBatch
    from batchserve.sampling.device import DeviceSampler
    from batchserve.sampling.recordings import Recordings


class QueuedStep:
    """The StepHandle of the GPU path: forward, sampling, tree walk and then a copy of the tokens are queued.

    logits [at least len(batch.logit_rows), vocab_size] stay on the device, and as they are until wait() has returned:
    of requests that the device could not decide, the host reads their rows. tokens: DeviceSampler.sample's; None:
    nothing is sampled.
    """

    is_running = True
    is_trial = False

    def __init__(
        self,
        batch: RaggedBatch,
        sampler: DeviceSampler,
        logits: torch.Tensor,
        tokens: torch.Tensor | None,
        forced: Recordings,
    ) -> None:
        self._batch = batch
        self._sampler = sampler
        self._logits = logits
        self._forced = forced
        self._is_sampled = tokens is not None
        # Where nothing is sampled it is still waited for: what the step took is learned from.
        self._copy = HostCopy(_nothing(logits) if tokens is None else tokens)

    def wait(self) -> StepTokens:
        rows = self._copy.wait()
        batch = self._batch
        found: list[VerifiedTokens | None] = [None] * len(batch.request_ids)
        if self._is_sampled:
            found = self._sampler.to_verified(rows, batch, self._verify_on_host)
        verified = StepTokens.of(found)
        prompts = {place: self._logits[batch.prompt_rows(place)].float().cpu().numpy() for place in batch.prompts}
        verified.prompt_logprobs = prompt_logprobs(batch, prompts)
        return verified

    def _verify_on_host(self, index: int) -> VerifiedTokens:
        rows, first = self._batch.requests[index], int(self._batch.first_logit[index])
        logits = self._logits[first : first + 1 + rows.num_draft_tokens].float().cpu().numpy()
        recorded = self._forced.get(rows.request_id, ())
        return verify_request(rows, RowSampler(logits), recorded, self._batch.adjustments.get(index))


def _nothing(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32, device=logits.device)


class HostCopy:
    """A tensor on its way to the host. The copy is queued after the kernels that compute it."""

    def __init__(self, source: torch.Tensor) -> None:
        self._host, self._event = source, None
        if source.device.type == "cuda":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
