"""An engine core without a model: every answer is known, so each step's events can be foretold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batchserve.attention.base import LayerShape
from batchserve.attention.cpu import CpuBackend
from batchserve.config import EngineConfig
from batchserve.decoding_length.policy import FixedDrafting
from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree, NullDrafter
from batchserve.engine.detokenizer import Decoder
from batchserve.engine.drafting import DraftStage
from batchserve.engine.engine_core import EngineCore, Event
from batchserve.errors import BatchserveError
from batchserve.kv.slab import SlabAllocator
from batchserve.metrics import EngineMetrics
from batchserve.request import DraftScope, Request
from batchserve.runner.model_runner import ModelRunner
from batchserve.runner.ragged_batch import RaggedBatch
from batchserve.sampling.verify import StepTokens, VerifiedTokens, walk_tree
from batchserve.scheduler.scheduler import Scheduler
from batchserve.types import Delta, FinishReason, SpeculationParams
from tests.factories import make_request, resolve_speculation

MAX_MODEL_LEN = 256


class Letters:
    """A tokenizer whose token is a character's code point; codes below 32 are special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token >= 32 or not skip_special_tokens)


@dataclass
class _Handle:
    batch: RaggedBatch
    runner: ScriptedRunner

    is_running = False
    is_trial = False

    def wait(self) -> StepTokens:
        if self.runner.error is not None:
            error, self.runner.error = self.runner.error, None
            raise error
        each = [None if rows.sampling is None else self._walk(i) for i, rows in enumerate(self.batch.requests)]
        return StepTokens.of(each)

    def _walk(self, index: int) -> VerifiedTokens:
        rows = self.batch.requests[index]
        script, first = self.runner.scripts[rows.request_id], rows.context_len + rows.num_pending
        return walk_tree(rows.token_ids, rows.parents, rows.root, lambda row, depth: script[first + depth])


class ScriptedRunner(ModelRunner):
    """The token at every absolute position of a request is written down beforehand."""

    def __init__(self, backend: CpuBackend) -> None:
        self.backend = backend
        self.scripts: dict[str, list[int]] = {}
        self.error: Exception | None = None  # raised by the next step
        self.batches: list[RaggedBatch] = []

    def launch(self, batch: RaggedBatch) -> _Handle:  # type: ignore[override]
        self.batches.append(batch)
        return _Handle(batch, self)


class PerfectDrafter(Drafter):
    """Proposes the script itself, as one chain; keeps books of who is known to it."""

    name = "perfect"

    def __init__(self) -> None:
        self.runner: ScriptedRunner | None = None
        self.lengths: dict[str, int] = {}
        self.shared: dict[str, list[int]] = {}
        self.started: dict[str, DraftRequest] = {}
        self.cleared: list[DraftScope] = []
        self.unready: set[str] = set()  # drafters that requests cannot be started with yet

    def is_ready_for(self, drafter: str) -> bool:
        return drafter not in self.unready

    def clear_scope(self, scope: DraftScope) -> None:
        self.cleared.append(scope)

    def start(self, request: DraftRequest) -> None:
        assert request.request_id not in self.lengths
        assert self.is_ready_for(request.drafter)
        self.started[request.request_id] = request
        self.lengths[request.request_id] = len(request.prompt_token_ids)
        self.shared[request.request_id] = []

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        assert self.runner is not None
        trees = []
        for query in queries:
            start = self.lengths[query.request_id]
            chain = self.runner.scripts[query.request_id][start : start + min(query.max_tokens, query.max_depth)]
            trees.append(DraftTree(chain, list(range(-1, len(chain) - 1)), [1.0] * len(chain)))
        return trees

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.lengths[request_id] += len(token_ids)

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.shared[request_id] += token_ids

    def end(self, request_id: str) -> None:
        del self.lengths[request_id]


@dataclass
class ScriptedEngine:
    """A core, its parts, a clock to be set by hand, and all that it has emitted."""

    core: EngineCore
    runner: ScriptedRunner
    drafter: PerfectDrafter | None
    config: EngineConfig
    events: list[list[Event]] = field(default_factory=list)
    now_s: float = 0.0

    def deltas(self, request_id: str) -> list[Delta]:
        return [e for batch in self.events for r, e in batch if r.request_id == request_id and isinstance(e, Delta)]

    def failures(self, request_id: str) -> list[BatchserveError]:
        mine = [event for batch in self.events for request, event in batch if request.request_id == request_id]
        return [event for event in mine if isinstance(event, BatchserveError)]

    def text(self, request_id: str) -> str:
        return "".join(delta.text for delta in self.deltas(request_id))

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas(request_id) for token in delta.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        return self.deltas(request_id)[-1].finish_reason

    def step(self) -> None:
        self.core.step()
        self.core.check_integrity()

    def run(self) -> None:
        for _ in range(2000):
            if not self.core.has_work:
                break
            self.step()
        self.assert_clean()

    def assert_clean(self) -> None:
        allocator = self.core.executor.allocator
        assert not self.core.has_work
        self.core.check_integrity()
        assert allocator.free_tokens == allocator.total_tokens
        assert not self.drafter or not self.drafter.lengths
        assert not [*self.core._texts]


def scripted_engine(
    *, is_drafting: bool = False, total_tokens: int = 4096, decoder: Decoder | None = None, **options: object
) -> ScriptedEngine:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    allocator = SlabAllocator([LayerShape(1, 1, 1)], "float32", total_tokens)
    runner = ScriptedRunner(CpuBackend(allocator, 1, has_kernel=False))
    perfect = PerfectDrafter() if is_drafting else None
    if perfect is not None:
        perfect.runner = runner
    drafter: Drafter = perfect or NullDrafter()
    engine: ScriptedEngine
    scheduler = Scheduler(config, allocator, min(MAX_MODEL_LEN, allocator.total_tokens))
    drafts = DraftStage(drafter, FixedDrafting(), allocator, lambda: engine.now_s)
    core = EngineCore(scheduler, drafts, runner, decoder or Letters(), EngineMetrics(), lambda: engine.now_s)
    engine = ScriptedEngine(core, runner, perfect, config)
    core.emit = engine.events.append
    return engine


def add(
    engine: ScriptedEngine,
    request_id: str,
    answer: str,
    *,
    prompt: str = "prompt",
    speculation: SpeculationParams | None = None,
    **options: Any,
) -> Request:
    """Queue a request whose model says `answer`, and then dots without end."""
    prompt_ids = [ord(c) for c in prompt]
    engine.runner.scripts[request_id] = prompt_ids + [ord(c) for c in answer] + [ord(".")] * 600
    resolved = resolve_speculation(engine.config, speculation)
    request = make_request(request_id, prompt_ids, speculation=resolved, **{"max_tokens": 40, **options})
    engine.core.add(request)
    return request
