"""Requests of the bundled model's kinds, the same for the same seed."""

from __future__ import annotations

import inspect
import random
import shlex
import string
import textwrap
import tokenize
import zipfile
from typing import TYPE_CHECKING

from batchserve.v1 import generation_pb2 as pb
from training.corpus import Corpus, build_corpora
from training.tasks import sample_example

if TYPE_CHECKING:
    import types

# A few modules, not the whole standard library: enough for varied prompts, and read in a moment.
SOURCES: tuple[types.ModuleType, ...] = (inspect, shlex, string, textwrap, tokenize, zipfile)


class Workload:
    """Greedy requests; the prompts of two seeds are different, their distribution is the same."""

    def __init__(self) -> None:
        self._corpus: Corpus = build_corpora([inspect.getsource(module) for module in SOURCES])[0]

    def request(self, seed: str, is_speculating: bool, max_tokens: int) -> pb.GenerateRequest:
        """One request with the server's own id; its prompt is in the bundled model's chat template."""
        example = sample_example(self._corpus, random.Random(seed))
        mode = pb.SpeculationOptions.MODE_AUTO if is_speculating else pb.SpeculationOptions.MODE_OFF
        return pb.GenerateRequest(
            text=f"<|user|>{example.prompt}<|assistant|>",  # the tokenizer puts the BOS in front
            sampling_params=pb.SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=max_tokens),
            speculation=pb.SpeculationOptions(mode=mode),
        )
