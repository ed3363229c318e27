"""transformers' generate in this process: greedy, all prompts as one batch; they must have the same length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.protocol import Prompts, serve


class Generate:
    """A model; drafts are not for it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def pid(self) -> int:
        return os.getpid()

    @torch.inference_mode()
    def answer(self, prompts: Prompts, max_tokens: int, drafts: bool) -> list[list[int]]:
        ids = torch.tensor(prompts)
        sizes = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **sizes)
        return [answer[len(prompts[0]) :].tolist() for answer in out]


@contextmanager
def load(message: dict[str, Any]) -> Iterator[Generate]:
    yield Generate(AutoModelForCausalLM.from_pretrained(message["model"], dtype=torch.bfloat16).eval())


if __name__ == "__main__":
    serve(load)
