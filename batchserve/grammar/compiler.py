"""Compiles grammars for the vocabulary of one model, by llguidance."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from batchserve.errors import GrammarError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from llguidance import LLMatcher, LLTokenizer

    from batchserve.grammar.definition import Grammar

MAX_KEPT = 16  # compiled grammars
MAX_REASON_CHARS = 500
UNUSABLE = "the model's tokenizer cannot be used with grammars"
PROBES = ("text", ' "a": [1.5, -2]}\n', "ü 😀  end")
MAX_LEXER_STATES = 100_000  # of a grammar, some 50 MB; all answers that follow it share them, so they only grow
MAX_AGAIN_S = 0.05  # what may be compiled while a step waits for it


class Vocabulary(NamedTuple):
    """A model's vocabulary, as the library needs it. definition: the text of its tokenizer.json. size: the number of
    the tokenizer's tokens or of the model's logits, whichever is greater.
    """

    definition: str
    size: int
    eos_token_ids: tuple[int, ...]

    def ends(self) -> list[int]:
        return [token for token in self.eos_token_ids if token < self.size]

    def stand_in(self) -> list[int]:
        """Returns what the library takes for an end token, if the model has none: it wants one. It is never given."""
        return [] if self.ends() else [self.size - 1]

    def load(self) -> LLTokenizer:
        """Raises GrammarError if the library cannot read the tokenizer, or not as it is meant."""
        from llguidance import LLTokenizer

        definition = json.loads(self.definition)
        _without_prefix_space(definition.get("pre_tokenizer"))
        ends = self.ends() or self.stand_in()
        try:
            tokenizer = LLTokenizer(json.dumps(definition), n_vocab=self.size, eos_token=ends)
            texts = [tokenizer.decode_bytes(tokenizer.tokenize_str(text)).decode() for text in PROBES]
        except ValueError as error:
            raise GrammarError(f"{UNUSABLE}: {reason_of(error)}") from None
        if texts != [*PROBES]:
            raise GrammarError(f"{UNUSABLE}: it gives other texts back")
        return tokenizer


def _without_prefix_space(part: Any) -> None:
    """Changes a definition so that it puts no space before a text: what a grammar forces begins anywhere."""
    if isinstance(part, dict):
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
        for each in part.get("pretokenizers", ()):
            _without_prefix_space(each)


def reason_of(error: Exception) -> str:
    """Returns the library's reason in one line, without its hints to programmers."""
    text = one_line(error).replace("<non-verbose/>", "")
    return text.partition(" Enable '")[0].partition("; increase limits.")[0].strip()[:MAX_REASON_CHARS]


def limits() -> Any:
    from llguidance import LLParserLimits

    # Errors go to clients: they must not tell of the parser's state.
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Returns a matcher at the beginning of an answer. Raises GrammarError, also if no answer follows the grammar."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, grammar.for_library(), log_level=0, limits=limits())
    except Exception as error:  # the library has several kinds, and a plain one for GBNF
        raise GrammarError(reason_of(error)) from None
    first = matcher.deep_copy()
    allowed = int.from_bytes(first.compute_bitmask(), "little")
    is_dead_end = "NoExtension" in first.get_error()
    if first.is_error() and not is_dead_end:
        raise GrammarError(reason_of(Exception(first.get_error())))
    for end in tokenizer.eos_tokens:
        allowed &= ~(1 << end)
    if is_dead_end or not allowed:
        raise GrammarError("no text follows it, or only the empty one")
    return matcher


class _Kept(NamedTuple):
    matcher: LLMatcher
    compile_s: float


class GrammarCompiler:
    """Compiles grammars, and keeps those that were used last. Thread-safe."""

    def __init__(self, vocabulary: Callable[[], Vocabulary | None]) -> None:
        """vocabulary: returns that of the model; None if it has no tokenizer that the library can read."""
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._stand_in: list[int] = []
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def stand_in(self) -> list[int]:
        """See Vocabulary. Known once a grammar is compiled."""
        return self._stand_in

    def matcher(self, grammar: Grammar) -> tuple[LLMatcher, int]:
        """Returns a matcher at the beginning of an answer, which shares what it learns with others of its grammar; and
        how many words of 32 bits its masks of tokens have. Raises GrammarError.
        """
        with self._lock:
            tokenizer = self._loaded()
            kept = self._kept.pop(grammar, None) or self._compiled(grammar, tokenizer)
            self._kept[grammar] = kept
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return kept.matcher.deep_copy(), -(-tokenizer.vocab_size // 32)

    def fresh(self, grammar: Grammar) -> LLMatcher | None:
        """Returns a matcher that shares nothing with those before it; None if a step would wait for it too long."""
        with self._lock:
            kept = self._kept.pop(grammar, None)
            if kept is None or kept.compile_s > MAX_AGAIN_S:
                return None
            self._kept[grammar] = self._compiled(grammar, self._loaded())
            return self._kept[grammar].matcher.deep_copy()

    def _compiled(self, grammar: Grammar, tokenizer: LLTokenizer) -> _Kept:
        began_s = time.monotonic()
        matcher = compile_grammar(grammar, tokenizer)
        return _Kept(matcher, time.monotonic() - began_s)

    def _loaded(self) -> LLTokenizer:
        if self._tokenizer is None:
            vocabulary = self._vocabulary()
            if vocabulary is None:
                raise GrammarError("the model has no tokenizer that can be used with grammars")
            self._tokenizer, self._stand_in = vocabulary.load(), vocabulary.stand_in()
        return self._tokenizer
