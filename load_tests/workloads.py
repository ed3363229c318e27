"""Requests in the forms of both protocols, and those of the bundled model's kinds."""

from __future__ import annotations

import inspect
import json
import random
import shlex
import string
import textwrap
import tokenize
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from batchserve.v1 import generation_pb2 as pb
from training.corpus import Corpus, build_corpora
from training.tasks import sample_example

if TYPE_CHECKING:
    import types

# A few modules, not the whole standard library: enough for varied prompts, and read in a moment.
SOURCES: tuple[types.ModuleType, ...] = (inspect, shlex, string, textwrap, tokenize, zipfile)
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Item:
    """One greedy request: a prompt or the messages of a chat. It has both if they make the same tokens.

    max_tokens: None: as many as the load test says. response_format: as in the OpenAI API.
    """

    prompt: str | None
    messages: tuple[dict[str, str], ...] = ()
    max_tokens: int | None = None
    response_format: dict[str, Any] | None = None

    def grpc_request(self, is_speculating: bool, max_tokens: int) -> pb.GenerateRequest:
        """Returns it for gRPC, with the server's own id. A prompt goes before messages."""
        mode = pb.SpeculationOptions.MODE_AUTO if is_speculating else pb.SpeculationOptions.MODE_OFF
        request = pb.GenerateRequest(
            sampling_params=pb.SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=self.max_tokens or max_tokens),
            speculation=pb.SpeculationOptions(mode=mode),
        )
        if self.prompt is not None:
            request.text = self.prompt
        else:
            messages = (pb.ChatMessage(role=each["role"], text=each["content"]) for each in self.messages)
            request.chat.messages.extend(messages)
        kind = (self.response_format or {}).get("type")
        if self.response_format is not None and kind == "json_schema":
            request.structured_output.json_schema = json.dumps(self.response_format["json_schema"]["schema"])
        elif kind == "json_object":
            request.structured_output.json_object = True
        return request

    @property
    def http_path(self) -> str:
        """Where it is sent over HTTP. Messages go before a prompt."""
        return CHAT_PATH if self.messages else COMPLETION_PATH

    def http_body(self, is_speculating: bool, max_tokens: int) -> dict[str, Any]:
        """Returns the body of a call that streams and counts its tokens."""
        body: dict[str, Any] = {"messages": list(self.messages)} if self.messages else {"prompt": self.prompt}
        body |= {
            "max_tokens": self.max_tokens or max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "speculation": {"is_enabled": is_speculating},
        }
        if self.response_format is not None:
            body["response_format"] = self.response_format
        return body


class Workload(Protocol):
    """What users send."""

    def item(self, seed: str) -> Item:
        """Returns one request, the same for the same seed."""


class BundledWorkload:
    """Tasks of the bundled model; two seeds seldom draw the same prompt, their distribution is the same."""

    def __init__(self) -> None:
        self._corpus: Corpus = build_corpora([inspect.getsource(module) for module in SOURCES])[0]

    def item(self, seed: str) -> Item:
        """Returns one request. Its prompt is in the bundled model's chat template; the tokenizer adds a BOS."""
        prompt = sample_example(self._corpus, random.Random(seed)).prompt
        return Item(f"<|user|>{prompt}<|assistant|>", ({"role": "user", "content": prompt},))
