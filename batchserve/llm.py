"""The offline API: answers prompts with the same core as the server."""

from __future__ import annotations

import numbers
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from batchserve.config import EngineConfig
from batchserve.engine.engine_core import Event
from batchserve.engine.output_collector import OutputCollector
from batchserve.errors import BatchserveError, InvalidRequestError, invalid
from batchserve.forks import OwnerProcess
from batchserve.interrupts import delay_interrupts
from batchserve.option_checks import expanded_path
from batchserve.startup.build import build_engine
from batchserve.types import Chat, Delta, ModelInfo, Prompt, RequestOutput, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from batchserve.request import Request

_Arguments = tuple[Prompt, SamplingParams, SpeculationParams, int]  # of one request; the last is its priority
T = TypeVar("T")


class LLM:
    """A model and an engine in this process, for batches of prompts.

    The options are those of EngineConfig. Calls from several threads take turns, whereas AsyncEngine serves its callers
    concurrently. On a CPU, it sets torch's number of compute threads for the whole program (`num_threads`).
    """

    def __init__(self, model: str = "bundled", **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        self._built = build_engine(self.config)
        self._core, self._processor, self._info = self._built.core, self._built.processor, self._built.info
        self._num_requests = 0
        self._turn = threading.Lock()
        self._maker = OwnerProcess("LLM")

    @property
    def info(self) -> ModelInfo:
        return self._info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: SpeculationParams | Sequence[SpeculationParams] | None = None,
        priority: int | Sequence[int] = 0,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Returns the answers in the order of the prompts. A prompt is a string, a list of token ids, or a Chat.

        sampling_params, speculation, priority (higher comes first): one for all prompts, or one for each. All prompts
        are checked before any runs, so if one raises InvalidRequestError, nothing has run. A later error of one prompt
        (NonFiniteLogitsError, or what a logits processor raises) ends the call, and the other answers are lost.
        """
        self._maker.check()
        arguments = _all_arguments(_as_list(prompts), sampling_params, speculation, priority)  # runs callers' code
        with self._turn:
            groups = self._requests(arguments)
            collectors = self._run([request for group in groups for request in group], show_progress)
        return [OutputCollector.joined([collectors[each.request_id] for each in group]) for group in groups]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Returns the answers to one conversation, or to several. See conversation.Chat; options: generate()'s."""
        more = (tools or (), add_generation_prompt, continue_final_message, chat_template_kwargs or {})
        is_one = isinstance(messages, Sequence) and all(isinstance(each, Mapping) for each in messages)
        chats = [Chat(each, *more) for each in ([messages] if is_one else messages)]  # type: ignore[arg-type]
        return self.generate(chats, sampling_params, **options)

    def _run(self, requests: list[Request], show_progress: bool) -> dict[str, OutputCollector]:
        """Answers requests. Returns the complete answers by request id."""
        collectors = {r.request_id: OutputCollector(r.token_ids[:]) for r in requests}
        errors: list[Exception] = []
        self._core.executor.bind_thread()
        # A step that is cut short would leave the engine's state wrong for good.
        with delay_interrupts() as let_interrupts_in, _progress_bar(len(requests), show_progress) as advance:

            def collect(events: list[Event]) -> None:
                for request, event in events:
                    if isinstance(event, BatchserveError):
                        errors.append(event)
                        continue
                    collectors[request.request_id].add(event)
                    try:
                        advance(event)
                    except Exception as error:  # raised here, it would leave a step half done
                        errors.append(error)

            self._core.emit = collect
            try:
                for request in requests:
                    self._core.add(request)
                while self._core.has_work and not errors:
                    self._core.step()
                    let_interrupts_in()
            finally:  # after an error or Ctrl-C, nothing is left for the next call
                self._core.abort_all()
                self._core.emit = lambda events: None  # the replaced function holds all prompts and answers
        if errors:
            raise errors[0]
        self._core.check_integrity()
        return collectors

    def clear_draft_scope(self, draft_scope: str = "") -> None:
        """Forgets what the requests of a draft scope have shared. An empty name is the default scope.

        Raises InvalidRequestError.
        """
        self._maker.check()
        scope = self._processor.resolve_scope(SpeculationParams(draft_scope=draft_scope).draft_scope)
        if scope is not None:
            with self._turn, delay_interrupts():
                self._core.clear_draft_scope(scope)

    def save_drafts(self, path: str | os.PathLike[str]) -> None:
        """Saves what the default drafter shares to a file, for `draft_cache`. Writes none before its first request.

        Raises ConfigError, OSError.
        """
        self._maker.check()
        file = Path(expanded_path("path", path))
        with self._turn:
            self._built.save_drafts(file)

    def _requests(self, all_arguments: list[_Arguments]) -> list[list[Request]]:
        """Returns the requests of each prompt, one for each sample."""
        requests = []
        for place, arguments in enumerate(all_arguments):
            try:
                requests.append(self._request(*arguments))
            except InvalidRequestError as error:
                where = _where(error.field, place if len(all_arguments) > 1 else None)
                raise InvalidRequestError(error.reason, where, error.value, error.bound) from None
        return requests

    def _request(
        self, prompt: Prompt, params: SamplingParams, drafting: SpeculationParams, priority: int
    ) -> list[Request]:
        self._num_requests += 1
        request_id, token_ids = str(self._num_requests), self._processor.tokenize(prompt)
        samples = self._processor.new_requests(
            request_id,
            token_ids,
            params,
            drafting,
            time.monotonic(),
            priority=priority,
            is_whole=True,
            is_sharing_early=True,
        )
        return [self._built.begin(each) for each in samples]


def _where(field: str, place: int | None) -> str:
    """Returns the argument of generate() that an error refers to. place: the prompt's index if there are several."""
    which = "prompts" if place is None else f"prompts[{place}]"
    if field.startswith("prompt"):
        return which + field.removeprefix("prompt")
    field = "sampling_params" if field == "params" else field
    return field if place is None else f"{which}: {field}"


def _all_arguments(
    prompts: list[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    speculation: SpeculationParams | Sequence[SpeculationParams] | None,
    priority: int | Sequence[int],
) -> list[_Arguments]:
    params = _one_each("sampling_params", sampling_params, SamplingParams, len(prompts))
    speculations = _one_each("speculation", speculation, SpeculationParams, len(prompts))
    shared = priority
    if isinstance(priority, numbers.Integral) and not isinstance(priority, bool):  # NumPy's are included
        shared = int(priority)
    priorities = _one_each("priority", shared, int, len(prompts))
    return list(zip(prompts, params, speculations, priorities, strict=True))


def _one_each(field: str, value: T | Sequence[T] | None, kind: type[T], count: int) -> list[T]:
    if value is None or isinstance(value, kind):
        return [kind() if value is None else value] * count
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(invalid(field), field, value, f"one {kind.__name__}, or one for each prompt")
    values = list(cast("Sequence[T]", value))
    if len(values) != count:
        raise InvalidRequestError("LENGTH_MISMATCH", field, len(values), f"one, or one for each of {count} prompts")
    return values


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts. A single prompt may be a string or a flat list of ids."""
    if isinstance(prompts, str | Chat):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError("INVALID_PROMPT", "prompts", prompts, "text, token ids, or a list of these")
    # To isinstance, elements of NumPy arrays and PyTorch tensors are not integers.
    items: Any = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if not isinstance(items, list):  # an array with zero dimensions
        raise InvalidRequestError("INVALID_PROMPT", "prompts", prompts, "text, token ids, or a list of these")
    if items and isinstance(items[0], numbers.Integral):
        return [items]
    return items


@contextmanager
def _progress_bar(total: int, is_shown: bool) -> Iterator[Any]:
    """Draws finished prompts and tokens per second. Yields a function to call with every delta."""
    if not is_shown:
        yield lambda delta: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("Processed prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)  # standard output belongs to the program
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=console) as progress:
        task = progress.add_task("", total=total, speed="")
        started, tokens = time.monotonic(), 0

        def advance(delta: Delta) -> None:
            nonlocal tokens
            tokens += len(delta.token_ids)
            speed = tokens / max(time.monotonic() - started, 1e-9)
            progress.update(task, advance=float(delta.finish_reason is not None), speed=f"{speed:.0f} output tokens/s")

        yield advance
