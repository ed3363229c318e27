"""Changes each row of a request's logits by its sampling parameters, before a token is chosen.

The definition, in NumPy, and the arrays that its compiled version (adjust_kernel.py) reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchserve.grammar.state import GrammarState
    from batchserve.request import ResolvedSampling
    from batchserve.sampling_params import LogitsProcessor

BITS = 32  # tokens per word of a mask
SPARE = 8  # tokens, beyond the longest answer and the drafts after it

# Of compiled code. Addresses: of the tokens of prompt and answer, int64; of the end tokens, int64; of masks, uint32,
# whose bits say which tokens are allowed (0: all are): the mask of each row of the walk is mask_words after the one
# before, or the same if that is 0; of bad words, int64, each its length and then its tokens; of biased tokens, int64,
# and their biases, float32.
ADJUSTMENTS = np.dtype(
    [
        ("history", np.int64),
        ("num_prompt", np.int64),
        ("min_tokens", np.int64),
        ("ends", np.int64),
        ("num_ends", np.int64),
        ("masks", np.int64),
        ("mask_words", np.int64),
        ("bad_words", np.int64),
        ("num_bad_words", np.int64),
        ("ngram_size", np.int64),
        ("biased", np.int64),
        ("biases", np.int64),
        ("num_biased", np.int64),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ],
    align=True,
)


class ProcessorError(Exception):
    """A request's logits processor has failed."""


def mask_of(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """Returns the words of a mask that allows these tokens."""
    bits = np.zeros(-(-vocab_size // BITS) * BITS, np.bool_)
    bits[np.array(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def adjust_by_definition(
    logits: np.ndarray, sampling: ResolvedSampling, history: np.ndarray, num_prompt: int, grammar_mask: bytes = b""
) -> np.ndarray:
    """Returns a row of float32 logits [vocab_size] as the sampling parameters have it, a copy.

    history: int64, the tokens before it, of which num_prompt are the prompt's. grammar_mask: of the tokens that its
    grammar allows, if it has one. The order of operations is vLLM's.
    """
    row = logits.copy()
    for mask in filter(None, (sampling.allowed, grammar_mask)):
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        row[bits[: len(row)] == 0] = -np.inf
    size, tokens = len(history), history.tolist()
    for word in sampling.bad_words:
        if tokens[max(0, size - len(word) + 1) :] == list(word[:-1]):
            row[word[-1]] = -np.inf
    ngram = sampling.no_repeat_ngram_size
    for start in range(size - ngram + 1 if ngram else 0):
        if tokens[start : start + ngram - 1] == tokens[size - ngram + 1 :]:
            row[tokens[start + ngram - 1]] = -np.inf
    if size - num_prompt < sampling.min_tokens:
        row[[*sampling.end_token_ids]] = -np.inf
    for token, bias in sampling.logit_bias:
        row[token] += np.float32(bias)
    seen = np.unique(history)
    if sampling.repetition_penalty != 1.0:
        penalty = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    given, counts = np.unique(history[num_prompt:], return_counts=True)
    row[given] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    row[given] -= np.float32(sampling.presence_penalty)
    return row


class RowAdjustments:
    """The adjustments of one request. address: that of its ADJUSTMENTS, whose arrays live as long as this object.

    history int64 has room for the longest answer and for the drafts after it, which walks write there.
    """

    def __init__(self, sampling: ResolvedSampling, prompt: Sequence[int], capacity: int) -> None:
        """capacity: the most tokens of prompt, answer and drafts."""
        self.sampling, self.num_prompt, self.size = sampling, len(prompt), 0
        self.grammar: GrammarState | None = None  # of a request that asks for one, as soon as that is compiled
        self._row_masks = np.zeros((0, 0), np.uint32)
        self.history = np.zeros(capacity + SPARE, np.int64)
        self.append(prompt)
        words = [part for word in sampling.bad_words for part in (len(word), *word)]
        self._allowed = allowed = np.frombuffer(sampling.allowed, np.uint32).copy()
        ends, bad_words = np.array([*sampling.end_token_ids], np.int64), np.array(words, np.int64)
        biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
        biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._arrays = self.history, ends, allowed, bad_words, biased, biases
        history, end, mask, word, token, bias = (each.ctypes.data for each in self._arrays)
        record = (history, self.num_prompt, sampling.min_tokens, end, len(ends), mask if len(allowed) else 0, 0, word,
                  len(sampling.bad_words), sampling.no_repeat_ngram_size, token, bias, len(biased),
                  sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)  # fmt: skip
        self._record = np.array([record], ADJUSTMENTS)
        self.address = self._record.ctypes.data

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens to the history. Raises GrammarError."""
        self.history[self.size : self.size + len(token_ids)] = token_ids
        self.size += len(token_ids)
        if self.grammar is not None:
            self.grammar.accept(token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether the grammar lets nothing follow the answer."""
        return self.grammar is not None and self.grammar.is_complete

    def mask_rows(self, token_ids: Sequence[int], parents: Sequence[int], is_verified: Sequence[bool]) -> None:
        """Finds what the grammar allows after each row of the request's draft tree; see GrammarState.fill_masks.

        Raises GrammarError; then it allows nothing.
        """
        if self.grammar is None:
            return
        num_rows, num_words = len(token_ids) + 1, self.grammar.num_words
        if len(self._row_masks) < num_rows:
            self._row_masks = np.zeros((num_rows, num_words), np.uint32)
            self._record["masks"], self._record["mask_words"] = self._row_masks.ctypes.data, num_words
        masks = self._row_masks[:num_rows]
        self.grammar.fill_masks(masks, token_ids, parents, is_verified)
        if len(self._allowed):
            masks[:, : len(self._allowed)] &= self._allowed

    def adjusted(self, logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
        """Returns a row of logits, adjusted by definition. path: draft tokens between the history and the row.

        Raises ProcessorError.
        """
        history = np.concatenate((self.history[: self.size], np.array(path, np.int64)))
        for i, processor in enumerate(self.sampling.logits_processors):
            logits = _processed(f"logits_processors[{i}]", processor, history, logits)
        mask = b"" if self.grammar is None else self.grammar.mask_after(path).tobytes()
        return adjust_by_definition(logits, self.sampling, history, self.num_prompt, mask)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "its text cannot be made"


def _processed(name: str, processor: LogitsProcessor, history: np.ndarray, logits: np.ndarray) -> np.ndarray:
    try:
        found = np.asarray(processor(history.tolist(), logits.copy()), np.float32)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a SystemExit, too, would end the engine
        raise ProcessorError(f"{name} raised {type(error).__name__}: {_text_of(error)}") from None
    if found.shape != logits.shape:
        raise ProcessorError(f"{name} has returned the shape {found.shape}: must be {logits.shape}")
    return found
