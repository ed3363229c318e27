"""One request inside the engine: its tokens, its progress and its legal transitions."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from batchserve.request_table import RequestTable
from batchserve.row_adjustments import RowAdjustments
from batchserve.sampling_params import LogitsProcessor
from batchserve.types import FinishReason, Timing, TokenLogprobs, Usage

if TYPE_CHECKING:
    from batchserve.grammar.definition import Grammar

TENANT = "default"  # of all callers where there are no keys


@dataclass(frozen=True, slots=True)
class DraftScope:
    """Who shares drafts and K/V: what one key's requests wrote is never proposed, or found cached, under another."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling parameters with every default filled in and every bound checked.

    `end_token_ids` are the EOS tokens (none under ignore_eos) and the request's stop tokens.
    """

    temperature: float
    top_k: int  # 0 is off
    top_p: float  # 1 is off
    seed: int
    max_tokens: int
    end_token_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    stop_token_ids: frozenset[int] = frozenset()  # of end_token_ids those that are given as the reason
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    has_processed_logprobs: bool = False
    min_p: float = 0.0  # 0 is off
    # These change logits (row_adjustments.py). allowed: a mask of tokens; empty: all.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: bytes = b""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    grammar: Grammar | None = None
    ignored_end_token_ids: tuple[int, ...] = ()  # end tokens of the model that a grammar's end does not mean
    changes_logits: bool = field(init=False)  # rows of logits have to be adjusted before a token is chosen
    is_argmax: bool = field(init=False)  # nothing is asked of a row but its greatest logit

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes_logits", self._changes_logits())
        is_argmax = self.temperature == 0.0 and not self.changes_logits and self.logprobs is None
        object.__setattr__(self, "is_argmax", is_argmax)

    def _changes_logits(self) -> bool:
        has_penalty = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        is_banning = self.no_repeat_ngram_size > 0 or self.min_tokens > 0 or bool(self.bad_words or self.allowed)
        return has_penalty or is_banning or bool(self.logit_bias or self.logits_processors or self.grammar)


GREEDY = ResolvedSampling(0.0, 0, 1.0, 0, 1, frozenset())  # one token: for steps that nobody has asked for


@dataclass(frozen=True, slots=True)
class ResolvedSpeculation:
    """Speculation with every default filled in and every bound checked; as it stands: none.

    `max_draft_tokens` (a step) and `branch_length` are within the server's bounds. A `draft_scope` of None shares
    nothing. tpot_target_s: seconds per output token that the scheduler favours the request to reach.
    """

    drafter: str = "none"
    max_draft_tokens: int = 0
    branch_length: int = 1
    draft_scope: DraftScope | None = None
    references: Sequence[Sequence[int]] = ()
    tpot_target_s: float | None = None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it is sent to the engine, with every bound checked. Times are seconds of the engine's clock.

    is_whole: its client is given all of the answer at its end. is_sharing_early: others may draft from it before that,
    because the same caller has asked for them. prefix_scope: see Request. fork_of: the id of the request with the same
    prompt whose K/V it begins with; num_forks: how many requests begin with the K/V of this one. echo: what the text
    of the answer begins with.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: ResolvedSampling
    speculation: ResolvedSpeculation
    arrival_s: float
    deadline_s: float | None = None
    priority: int = 0  # higher comes first
    prefix_scope: DraftScope | None = None
    is_whole: bool = False
    is_sharing_early: bool = False
    fork_of: str = ""
    num_forks: int = 0
    echo: str = ""

    def begin(self) -> Request:
        """The engine's state of this request."""
        return Request(
            self.request_id,
            self.prompt_token_ids,
            self.sampling,
            self.arrival_s,
            self.speculation,
            self.deadline_s,
            self.priority,
            prefix_scope=self.prefix_scope,
            is_whole=self.is_whole,
            is_sharing_early=self.is_sharing_early,
            fork_of=self.fork_of,
            num_forks=self.num_forks,
            echo=self.echo,
        )


FORKS = "/forks"  # no caller's: the tenant of requests that share K/V only with their forks: it is kept for nobody else
FIRST_PAUSE = 8  # tokens without drafts behind some whose numbers overflowed; each further time twice as many


class RequestStatus(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; preemption goes back from RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_LEGAL = {
    (RequestStatus.WAITING, RequestStatus.RUNNING),
    (RequestStatus.RUNNING, RequestStatus.WAITING),
    (RequestStatus.WAITING, RequestStatus.FINISHED),
    (RequestStatus.RUNNING, RequestStatus.FINISHED),
}


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. The scheduler and the engine core change it; nobody else does.

    token_ids: the prompt, then the answer so far, at most max_total_tokens. table and slot: where its numbers are that
    compiled code reads, while it is in flight. Times are seconds of the engine's clock.
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    sampling: ResolvedSampling
    arrival_s: float
    speculation: ResolvedSpeculation = field(default_factory=ResolvedSpeculation)
    deadline_s: float | None = None
    priority: int = 0  # higher comes first
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    table: RequestTable | None = field(init=False, repr=False, default=None)
    slot: int = field(init=False, default=-1)
    prefix_scope: DraftScope | None = None  # whose cached K/V it may begin with, and leaves its own to; None: nobody's
    num_cached_tokens: int = 0  # of the prompt, whose K/V was there
    num_published_tokens: int = 0  # whose text is out
    is_whole: bool = False  # its client is given all of it at its end
    is_sharing_early: bool = False  # others may draft from it before that
    fork_of: str = ""  # see NewRequest, as for num_forks
    num_forks: int = 0
    echo: str = ""  # which its text begins with; empty once that is given
    num_given_tokens: int = 0  # that others may draft from
    num_preemptions: int = 0
    next_pause: int = FIRST_PAUSE  # of drafts, in tokens
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the answer's tokens, if it asks for them
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of the prompt's; empty once given
    adjustments: RowAdjustments | None = field(init=False, repr=False, default=None)  # if it changes logits
    is_read_along: bool = field(init=False)  # text is made step by step: for its client, or to find stop strings
    _end_tokens: np.ndarray = field(init=False, repr=False)  # whose address is in the table
    _num_computed: int = 0  # this and the next two: while it is in no table
    _num_draft: int = 0
    _num_accepted: int = 0

    def __post_init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        self.is_read_along = not self.is_whole or bool(self.sampling.stop)
        self._end_tokens = np.array([*self.sampling.end_token_ids], np.int64)
        if self.sampling.changes_logits:
            capacity = self.max_total_tokens + self.speculation.max_draft_tokens
            self.adjustments = RowAdjustments(self.sampling, prompt_token_ids, capacity)
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def numbers(self) -> tuple[float, ...]:
        """The fields of request_table.ROW, but for the generation."""
        allowed, ends = self.speculation, self._end_tokens
        tokens = len(self.token_ids), self.num_prompt_tokens, self._num_computed, self.token_ids[-1]
        drafts = self.max_total_tokens, allowed.max_draft_tokens, allowed.branch_length, 0
        return *tokens, *drafts, self._num_draft, self._num_accepted, ends.ctypes.data, len(ends), self.arrival_s, False

    def leave_table(self) -> None:
        """Keep what the table knows: the slot will be another request's."""
        self._num_computed = self.num_computed_tokens
        self._num_draft, self._num_accepted = self.num_draft_tokens, self.num_accepted_draft_tokens
        self.table, self.slot = None, -1

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens with K/V. While the request runs at least one token has none."""
        return self._num_computed if self.table is None else self.table.num_computed.item(self.slot)

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        if self.table is None:
            self._num_computed = count
        else:
            self.table.num_computed[self.slot] = count

    @property
    def num_pending_tokens(self) -> int:
        """Tokens without K/V: 1 while decoding, more while (re)computing a prompt."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_draft_tokens(self) -> int:
        return self._num_draft if self.table is None else self.table.num_draft_tokens.item(self.slot)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return self._num_accepted if self.table is None else self.table.num_accepted_draft_tokens.item(self.slot)

    def append(self, token_ids: list[int]) -> None:
        """Add tokens to the answer."""
        self.token_ids += token_ids
        if self.adjustments is not None:
            self.adjustments.append(token_ids)
        if self.table is not None:
            row = self.table.rows[self.slot]
            row["num_tokens"], row["last_token"] = len(self.token_ids), self.token_ids[-1]

    def wanted_tokens(self, start: int, count: int) -> list[int]:
        """Returns the prompt's tokens after each of `count` tokens from `start` on, if it asks for their logprobs."""
        is_known = self.first_token_s is not None  # a preempted request computes its prompt again
        if self.sampling.prompt_logprobs is None or is_known or start + 1 >= self.num_prompt_tokens:
            return []
        return self.token_ids[start + 1 : min(start + count + 1, self.num_prompt_tokens)]

    def stop(self, reason: str, num_surplus: int) -> None:
        """A stop string ended the answer, and so many accepted draft tokens came after it."""
        assert self.table is not None
        self.table.num_accepted_draft_tokens[self.slot] -= num_surplus
        self.table.rows["is_over"][self.slot] = True
        self.finish_reason, self.stop_reason = FinishReason.STOP, reason

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Raises RuntimeError on an illegal transition: that is a bug, never a client's fault."""
        if (self.status, status) not in _LEGAL:
            raise RuntimeError(f"request {self.request_id!r}: illegal transition {self.status} -> {status}")
        self.status = status

    def pause_drafts(self) -> None:
        """Go on without drafts for a while: those of the last step gave numbers that say nothing."""
        assert self.table is not None
        self.table.rows["plain_until"][self.slot] = len(self.token_ids) + self.next_pause
        self.next_pause *= 2

    def usage(self, completion_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=self.num_cached_tokens,
            draft_tokens=self.num_draft_tokens,
            accepted_draft_tokens=self.num_accepted_draft_tokens,
        )

    def timing(self, now_s: float) -> Timing:
        def since(moment_s: float | None) -> float:
            return (now_s if moment_s is None else moment_s) - self.arrival_s

        return Timing(
            queue_s=since(self.first_scheduled_s),
            first_token_s=since(self.first_token_s),
            total_s=since(self.last_token_s),
        )
