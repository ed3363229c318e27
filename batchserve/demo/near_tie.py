"""Judges whether two answers differ only by rounding, with a plain forward pass of the model, without the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from batchserve.runner.chat import turn_end
from batchserve.runner.loader import DTYPES
from batchserve.runner.model_folder import resolve_model
from batchserve.sampling.near_tie import rounding_bound

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Verdict:
    """One token of an answer: how far its logit is below the best at its position, and the bound for rounding."""

    position: int
    loss: float
    bound: float

    @property
    def is_near_tie(self) -> bool:
        return self.loss <= self.bound


class NearTieJudge:
    """Runs the model with transformers in the server's dtype. Loads the model, so make one only if answers differ."""

    def __init__(self, model: str, dtype: str) -> None:
        disable_progress_bar()
        folder = resolve_model(model)
        self._dtype = dtype
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
        found = self._model.generation_config.eos_token_id
        listed = found if isinstance(found, list) else [found]
        ends = {*listed, self._tokenizer.eos_token_id, turn_end(self._tokenizer)}
        self._ends = sorted(int(end) for end in ends if end is not None)

    @torch.inference_mode()
    def judge(self, prompt: str | Sequence[int], answer: Sequence[int], start: int, *, is_ended: bool) -> Verdict:
        """Re-scores a greedy answer's tokens from `start` on, each given those before it; is_ended: by an end token.

        Returns the worst one. All tokens after the first difference count: the answers have nothing in common there.
        """
        tokens = [*answer, self._ends[0]] if is_ended else list(answer)
        prompt_ids: list[int] = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        ids = torch.tensor([prompt_ids + tokens])
        logits = self._model(ids).logits[0, len(prompt_ids) - 1 : -1].float().numpy()
        verdicts = []
        for i in range(start, len(tokens)):
            row = logits[i]
            if i == len(answer):
                tokens[i] = max(self._ends, key=row.__getitem__)
            verdicts.append(Verdict(i, float(row.max() - row[tokens[i]]), rounding_bound(self._dtype, row)))
        return max(verdicts, key=lambda verdict: verdict.loss - verdict.bound)
