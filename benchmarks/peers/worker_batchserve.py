"""batchserve's LLM in this process. Drafts are asked for by each round."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchserve import LLM, SamplingParams, SpeculationParams
from batchserve.interpreter import available_cores
from benchmarks.peers.protocol import Prompts, serve

# Requests with drafts share them, as other engines' do; those without leave nothing there for them to find.
SHARED, PRIVATE = "drafts", "request"


class OwnEngine:
    """An LLM, asked as the other engines are."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def pid(self) -> int:
        return os.getpid()

    def answer(self, prompts: Prompts, max_tokens: int, drafts: bool) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        speculation = SpeculationParams(drafts, draft_scope=SHARED if drafts else PRIVATE)
        outputs = self._llm.generate(prompts, params, speculation=speculation, show_progress=False)
        return [list(output.token_ids) for output in outputs]


@contextmanager
def load(message: dict[str, Any]) -> Iterator[OwnEngine]:
    yield OwnEngine(
        LLM(
            message["model"],
            max_num_seqs=message["max_requests"],
            max_num_batched_tokens=message["most_batched_tokens"],
            prefix_cache=False,
            # All cores, as the others have, however busy the machine is while these are loaded.
            **{"num_threads": available_cores(), **message.get("options", {})},
        )
    )


if __name__ == "__main__":
    serve(load)
