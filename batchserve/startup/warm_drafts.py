"""Makes a draft cache from recorded answers. A server that loads it drafts as if it had given them itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from transformers import AutoConfig

from batchserve.config import PRIVATE_SCOPE, EngineConfig
from batchserve.draft.base import DraftRequest
from batchserve.draft.factory import create_drafter, draft_parts
from batchserve.draft.kernels import KernelLoader
from batchserve.draft.router import RoutingDrafter
from batchserve.engine.input_processor import vocabulary_fingerprint
from batchserve.errors import ConfigError
from batchserve.files import check_readable
from batchserve.jsonl import Line, read_lines, text_of
from batchserve.request import TENANT, DraftScope
from batchserve.runner.loader import described
from batchserve.runner.model_folder import resolve_model
from batchserve.runner.tokenizer import load_tokenizer

AROUND = 2  # what a drafter stores besides the tokens of a text: its beginning and its end


@dataclass(frozen=True, slots=True)
class Warmed:
    """What was read, and what the drafter now holds. num_kept and num_lost include the tokens between two texts."""

    num_answers: int
    num_tokens: int
    num_bytes: int
    num_kept: int
    num_lost: int


class _Record(NamedTuple):
    prompt: list[int]
    response: list[int]


class _Vocabulary:
    """A model's tokenizer and vocabulary size. The model's weights are not read. Raises ConfigError."""

    def __init__(self, config: EngineConfig) -> None:
        source = resolve_model(config.model)
        tokenizer = load_tokenizer(source, config)
        if tokenizer is None:
            raise ConfigError(f"model = {config.model!r}: has no tokenizer, and answers are recorded as text")
        try:
            model_config = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        except Exception as error:
            raise ConfigError(
                f"model = {config.model!r}: its configuration cannot be loaded: {described(error)}"
            ) from error
        self._tokenizer = tokenizer
        self.size = int(model_config.get_text_config().vocab_size)

    @property
    def fingerprint(self) -> str:
        return vocabulary_fingerprint(self._tokenizer, self.size, "")

    def tokenize(self, text: str, *, is_prompt: bool) -> list[int]:
        """Returns the token ids of a text. Raises ValueError if the model does not have one of them."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=is_prompt)["input_ids"]
        if ids and max(ids) >= self.size:
            raise ValueError(f"token id {max(ids)}: the model's vocabulary ends at {self.size - 1}")
        return ids


def warm_drafts(path: Path, config: EngineConfig) -> Warmed:
    """Reads {"prompt", "response"} lines into `draft_cache`, adding to it if it exists, under `default_draft_scope`.

    Draws a progress bar on standard error. Raises ConfigError, with the line's number if a line is wrong. The cache is
    then as it was.
    """
    cache = config.draft.cache_path()
    if cache is None:
        raise ConfigError("draft_cache = None: must be the file that drafts are kept in")
    if config.default_draft_scope == PRIVATE_SCOPE:
        raise ConfigError(f"draft scope = {PRIVATE_SCOPE!r}: shares nothing, so nothing could be kept")
    check_readable(path)
    scope = DraftScope(TENANT, config.default_draft_scope)
    part = draft_parts(config).get(config.drafter, 0.0)  # a server would drop what does not fit into it
    drafters = {config.drafter: create_drafter(config.drafter, config, 0, part)}
    router = RoutingDrafter(config.drafter, drafters, KernelLoader(in_background=False))
    store = router.persistent()
    vocabulary = _Vocabulary(config)
    router.prepare()
    if cache.exists():
        router.load(cache, vocabulary.fingerprint, vocabulary.size)
    num_answers, num_tokens, expected = 0, 0, store.num_tokens()
    for record in _records(path, vocabulary):
        num_answers += 1
        num_tokens += len(record.response)
        expected += len(record.response) + AROUND if record.response else 0
        request_id = str(num_answers)
        router.start(DraftRequest(request_id, record.prompt, scope=scope))
        router.accept(request_id, record.response)
        router.share(request_id, record.response)
        router.end(request_id)
    if num_answers == 0:
        raise ConfigError(f"{path}: holds no answers")
    try:
        router.save(cache, vocabulary.fingerprint)
    except OSError as error:
        raise ConfigError(f"draft_cache = {str(cache)!r}: cannot be written: {error}") from error
    kept = store.num_tokens()
    return Warmed(num_answers, num_tokens, router.memory_bytes(), kept, expected - kept)


def _records(path: Path, vocabulary: _Vocabulary) -> Iterator[_Record]:
    with Progress(console=Console(stderr=True)) as progress, closing(read_lines(path)) as lines:
        task = progress.add_task("Warming drafts", total=_size(path))
        for line in lines:
            yield _record(line, vocabulary)
            progress.update(task, completed=line.num_bytes)


def _size(path: Path) -> int | None:
    """Returns the size in bytes, or None if it is not known."""
    try:
        return path.stat().st_size
    except OSError:  # reading the file reports the reason
        return None


def _record(line: Line, vocabulary: _Vocabulary) -> _Record:
    prompt, response = text_of(line, "prompt"), text_of(line, "response")
    try:
        return _Record(vocabulary.tokenize(prompt, is_prompt=True), vocabulary.tokenize(response, is_prompt=False))
    except ValueError as error:
        raise ConfigError(f"{line.where}: cannot be tokenised: {error}") from error
