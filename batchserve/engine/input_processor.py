"""Tokenises and validates requests. All errors in a request are found here, before the engine sees it."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from batchserve.config import PRIVATE_SCOPE, PROCESSED_LOGPROBS, EngineConfig, UnchosenScope, is_utf8
from batchserve.engine.arguments import INLINE_SIZE
from batchserve.engine.prompt_tokenizer import PromptTokenizer
from batchserve.errors import InvalidRequestError, invalid
from batchserve.grammar.checker import GrammarChecker
from batchserve.grammar.compiler import Vocabulary
from batchserve.grammar.definition import Grammar
from batchserve.request import FORKS, TENANT, DraftScope, NewRequest, Request, ResolvedSampling, ResolvedSpeculation
from batchserve.row_adjustments import mask_of
from batchserve.runner.compiled_tokenizer import CompiledTokenizer
from batchserve.sampling_params import MAX_SEED
from batchserve.types import (
    MAX_REQUEST_ID_CHARS,
    SamplingParams,
    SpeculationParams,
    check_priority,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.draft.factory import DraftLimits
    from batchserve.runner.compiled_tokenizer import AnyTokenizer
    from batchserve.runner.served_model import ServedModel
    from batchserve.types import Prompt

# The values of sampling parameters that do nothing, where None takes the model's default.
OFF = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that InputProcessor needs. Plain data, except for the tokenizer."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, float]
    tokenizer: AnyTokenizer | None = None

    @classmethod
    def of(cls, model: ServedModel, tokenizer: AnyTokenizer | None) -> ModelFacts:
        names = [each.name for each in fields(cls) if each.name != "tokenizer"]
        return cls(**{name: getattr(model, name) for name in names}, tokenizer=tokenizer)

    def vocabulary(self) -> Vocabulary | None:
        """Returns what grammars are compiled for; None without a tokenizer that has a definition in JSON."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if self.tokenizer is None or backend is None:
            return None
        size = max(self.vocab_size, backend.get_vocab_size(with_added_tokens=True))
        return Vocabulary(backend.to_str(), size, self.eos_token_ids)

    def without_python_tokenizer(self) -> ModelFacts:
        """Returns a copy that can be sent to another process: a tokenizer with Python code of its own cannot."""
        return self if isinstance(self.tokenizer, CompiledTokenizer) else replace(self, tokenizer=None)


class InputProcessor:
    """Checks and resolves requests against one model. Thread-safe: it keeps no state."""

    def __init__(
        self, facts: ModelFacts, max_model_len: int, config: EngineConfig, limits: Mapping[str, DraftLimits]
    ) -> None:
        self.facts, self.limits = facts, limits
        self._defaults = {**OFF, **(facts.defaults if config.generation_config == "auto" else {})}
        self._max_model_len = max_model_len
        self._default_drafter = config.drafter
        self._default_scope = config.default_draft_scope
        self._default_tpot_target_ms = config.tpot_target_ms
        self._is_adaptive = config.is_adaptive
        self._has_prefix_cache = config.prefix_cache
        self._has_processed_logprobs = config.logprobs_mode == PROCESSED_LOGPROBS
        self._prompts = PromptTokenizer(facts.tokenizer, facts.vocab_size, max_model_len)
        self._json_whitespace = config.json_whitespace
        self.grammars = GrammarChecker(facts.vocabulary)

    def with_isolated_default_scope(self) -> InputProcessor:
        """Returns a copy for callers that must not see each other's data. Requests that name no scope share nothing,
        unless the configuration names a scope for them.
        """
        changed = copy.copy(self)
        if isinstance(self._default_scope, UnchosenScope):
            changed._default_scope = PRIVATE_SCOPE
        return changed

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the checked token ids of a prompt. Raises InvalidRequestError. add_special_tokens: to a text."""
        return self._prompts.tokenize(prompt, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids. Raises InvalidRequestError."""
        self._prompts.check_ids("token_ids", token_ids)
        return self._prompts.decode(token_ids, skip_special_tokens, "token_ids")

    def resolve(self, params: SamplingParams, num_prompt_tokens: int) -> ResolvedSampling:
        """Fills in defaults and checks the bounds that need the model. Raises InvalidRequestError."""
        facts = self.facts
        room = self._max_model_len - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequestError(
                "CONTEXT_EXCEEDED",
                "max_tokens",
                params.max_tokens,
                f"at most {room}: the prompt has {num_prompt_tokens} tokens and max_model_len is {self._max_model_len}",
            )
        if params.top_k is not None and params.top_k > facts.vocab_size:
            raise InvalidRequestError(
                "INVALID_TOP_K", "top_k", params.top_k, f"at most {facts.vocab_size} (vocabulary)"
            )
        if params.stop and facts.tokenizer is None:
            raise InvalidRequestError("NO_TOKENIZER", "stop", params.stop, "empty: the model has no tokenizer")
        if params.min_tokens > room:
            raise InvalidRequestError("CONTEXT_EXCEEDED", "min_tokens", params.min_tokens, f"at most {room}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._prompts.check_ids(name, getattr(params, name))
        for token_id in params.logit_bias:
            if token_id not in range(facts.vocab_size):
                bound = f"token ids in 0..{facts.vocab_size - 1}"
                raise InvalidRequestError("TOKEN_ID_OUT_OF_RANGE", "logit_bias", token_id, bound)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(facts.eos_token_ids))
        return ResolvedSampling(
            **self._with_defaults(params),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            end_token_ids=frozenset(ends),
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            stop_token_ids=frozenset(params.stop_token_ids) - (set() if params.ignore_eos else {*facts.eos_token_ids}),
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=None if params.logprobs is None else min(params.logprobs, facts.vocab_size),
            prompt_logprobs=None if params.prompt_logprobs is None else min(params.prompt_logprobs, facts.vocab_size),
            has_processed_logprobs=self._has_processed_logprobs,
            min_tokens=params.min_tokens if ends else 0,
            logit_bias=tuple(sorted((token, bias) for token, bias in params.logit_bias.items() if bias)),
            bad_words=self._prompts.bad_words(params.bad_words),
            logits_processors=params.logits_processors,
            grammar=self._grammar(params),
            ignored_end_token_ids=tuple(set(facts.eos_token_ids) - ends),
            allowed=mask_of(params.allowed_token_ids, facts.vocab_size) if params.allowed_token_ids else b"",
        )

    def knows_grammar(self, params: SamplingParams) -> bool:
        """Returns whether it takes no time to check a request's grammar. Raises InvalidRequestError."""
        if not params.has_grammar:
            return True
        sizes = map(len, (str(params.json_schema), params.regex or "", params.ebnf or "", *params.choice))
        if sum(sizes) > INLINE_SIZE:
            return False
        grammar = Grammar.of(params, self._json_whitespace)
        return grammar is None or self.grammars.is_known(grammar)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Returns what the answer has to follow, checked in another process. Raises InvalidRequestError."""
        grammar = Grammar.of(params, self._json_whitespace)
        if grammar is not None:
            value = getattr(params, grammar.field)
            if reason := self.grammars.refusal(grammar):
                bound = f"one that can be followed: {reason}"
                raise InvalidRequestError(invalid(grammar.field), grammar.field, value, bound)
        return grammar

    def _with_defaults(self, params: SamplingParams) -> dict[str, Any]:
        """Returns the parameters of OFF, each with the request's value, or else the model's default."""
        given = {name: getattr(params, name) for name in OFF}
        return {name: self._defaults[name] if value is None else value for name, value in given.items()}

    def resolve_speculation(self, params: SpeculationParams, tenant: str = "") -> ResolvedSpeculation:
        """Fills in the server's defaults and checks the references. Raises InvalidRequestError."""
        if params.tpot_target_ms is not None and not self._is_adaptive:
            must_be = "unset: this server has no adaptive decoding length that could prefer the request"
            raise InvalidRequestError("INVALID_TPOT_TARGET_MS", "tpot_target_ms", params.tpot_target_ms, must_be)
        drafter = params.drafter or self._default_drafter
        limits = self.limits[drafter]
        references = self._prompts.references(params.references)
        has_drafts = params.is_enabled and limits.max_draft_tokens > 0 and params.max_draft_tokens != 0
        if params.tpot_target_ms is not None and not has_drafts:
            must_be = "unset: the request has no drafts that could be preferred"
            raise InvalidRequestError("INVALID_TPOT_TARGET_MS", "tpot_target_ms", params.tpot_target_ms, must_be)
        if not has_drafts:
            return ResolvedSpeculation()
        tokens, length = params.max_draft_tokens, params.branch_length
        target_ms = self._default_tpot_target_ms if params.tpot_target_ms is None else params.tpot_target_ms
        return ResolvedSpeculation(
            drafter=_plain(drafter),
            max_draft_tokens=limits.max_draft_tokens if tokens is None else min(tokens, limits.max_draft_tokens),
            branch_length=limits.branch_length if length is None else min(length, limits.branch_length),
            draft_scope=self.resolve_scope(params.draft_scope, tenant),
            references=references,
            tpot_target_s=None if target_ms is None else target_ms / 1e3,
        )

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    def vocabulary_fingerprint(self) -> str:
        """Returns a hash of the vocabulary, so that saved drafts are never loaded with another one."""
        return vocabulary_fingerprint(self.facts.tokenizer, self.facts.vocab_size, self.facts.name)

    def resolve_scope(self, draft_scope: str, tenant: str = "") -> DraftScope | None:
        """Returns the effective scope; None shares nothing."""
        scope = draft_scope or self._default_scope
        return None if scope == PRIVATE_SCOPE else DraftScope(tenant or TENANT, _plain(scope))

    def new_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        speculation: SpeculationParams,
        arrival_s: float,
        deadline_s: float | None = None,
        priority: int = 0,
        is_whole: bool = False,
        is_sharing_early: bool = False,
        tenant: str = "",
    ) -> NewRequest:
        """Builds a request that is sure to fit. Raises InvalidRequestError. Long references are slow to tokenise."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("INVALID_SAMPLING_PARAMS", "params", params, "a SamplingParams")
        if not isinstance(speculation, SpeculationParams):
            raise InvalidRequestError("INVALID_SPECULATION", "speculation", speculation, "a SpeculationParams")
        if len(request_id) > MAX_REQUEST_ID_CHARS or "\0" in request_id or not is_utf8(request_id):
            raise InvalidRequestError(
                "INVALID_REQUEST_ID",
                "request_id",
                request_id,
                f"at most {MAX_REQUEST_ID_CHARS} characters of UTF-8, none of them NUL",
            )
        sampling = self.resolve(params, len(prompt_token_ids))
        resolved = self.resolve_speculation(speculation, tenant)
        has_prefix = self._has_prefix_cache and sampling.prompt_logprobs is None  # which are of computed rows only
        return NewRequest(
            qualified_id(_plain(request_id), tenant),
            prompt_token_ids,
            sampling,
            resolved,
            arrival_s,
            deadline_s,
            check_priority(priority),
            self.resolve_scope(speculation.draft_scope, tenant) if has_prefix else None,
            is_whole,
            is_sharing_early,
            num_forks=params.n - 1,
            echo=self._prompts.echoed(prompt_token_ids, params.skip_special_tokens) if params.echo else "",
        )

    def new_requests(self, *arguments: Any, **options: Any) -> list[NewRequest]:
        """Returns new_request()'s request, and more of the same prompt if params.n samples are wanted of it."""
        first = self.new_request(*arguments, **options)
        count = first.num_forks + 1
        if count == 1:
            return [first]
        if first.sampling.temperature == 0.0:
            raise InvalidRequestError("INVALID_N", "n", count, "1 at temperature 0: all samples would be the same")
        if first.prefix_scope is None:
            first = replace(first, prefix_scope=DraftScope(FORKS, first.request_id))
        seeds = [(first.sampling.seed + i) % (MAX_SEED + 1) for i in range(count)]
        forks = [
            replace(
                first,
                request_id=fork_id(first.request_id, i),
                sampling=replace(first.sampling, seed=seeds[i], prompt_logprobs=None),
                fork_of=first.request_id,
                num_forks=0,
            )
            for i in range(1, count)
        ]
        return [first, *forks]

    def make_request(self, *arguments: Any, **options: Any) -> Request:
        """new_request(), for an engine in this thread."""
        return self.new_request(*arguments, **options).begin()


def qualified_id(request_id: str, tenant: str) -> str:
    """Returns the id of a request among those of all tenants, whose names have no slash."""
    return f"{tenant}/{request_id}" if tenant else request_id


def fork_id(request_id: str, index: int) -> str:
    """Returns the id of one of a request's samples; no client can choose it."""
    return f"{request_id}\0{index}" if index else request_id


def vocabulary_fingerprint(tokenizer: AnyTokenizer | None, vocab_size: int, model: str) -> str:
    """Returns a hash of vocab_size and every token's text and id; without a tokenizer, of vocab_size and the name."""
    tokens = model if tokenizer is None else sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([vocab_size, tokens]).encode()).hexdigest()


def _plain(text: str) -> str:
    """Converts a str subclass, such as an enum member, to str: another process may not know the class."""
    return str.__str__(text)
