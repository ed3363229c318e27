"""OpenVINO GenAI's ContinuousBatchingPipeline in this process. Runs in OpenVINO's environment, which has no batchserve.

Drafts (prompt lookup) are a property of a pipeline, so there is one process with and one without them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.protocol import Prompts, serve

# Taken from an earlier comparison of these engines; no other values were tried here.
DRAFT_TOKENS, NGRAM = 5, 3


class Pipeline:
    """A pipeline and its options."""

    def __init__(self, folder: str, max_requests: int, most_batched_tokens: int, drafts: bool) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = max_requests
        scheduler.max_num_batched_tokens = most_batched_tokens
        scheduler.cache_size = 1  # GiB
        properties: dict[str, Any] = {"prompt_lookup": True} if drafts else {}
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._drafts = drafts

    @property
    def pid(self) -> int:
        return os.getpid()

    def answer(self, prompts: Prompts, max_tokens: int, drafts: bool) -> list[list[int]]:
        if drafts != self._drafts:
            raise ValueError(f"drafts = {drafts}: this pipeline was made with {self._drafts}")
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        if drafts:
            config.num_assistant_tokens, config.max_ngram_size = DRAFT_TOKENS, NGRAM
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]


@contextmanager
def load(message: dict[str, Any]) -> Iterator[Pipeline]:
    yield Pipeline(message["model"], message["max_requests"], message["most_batched_tokens"], message["drafts"])


if __name__ == "__main__":
    serve(load)
