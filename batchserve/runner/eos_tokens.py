"""Extends a model's end tokens with those of its tokenizer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from batchserve.runner.chat import turn_end

if TYPE_CHECKING:
    from batchserve.runner.compiled_tokenizer import AnyTokenizer

logger = logging.getLogger(__name__)


def add_tokenizer_eos_ids(ends: tuple[int, ...], tokenizer: AnyTokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Returns the end tokens with those of the tokenizer, without which an answer would run on after its end.

    They are its end-of-sequence token and the special token that ends a turn in its chat template. A warning names the
    tokens that are added.
    """
    if tokenizer is None:
        return ends
    found = {"the tokenizer's end-of-sequence token": tokenizer.eos_token_id}
    found["the chat template's end of turn"] = turn_end(tokenizer)
    added: dict[int, str] = {}
    for what, token_id in found.items():
        if token_id is not None and 0 <= token_id < vocab_size and token_id not in ends:
            added.setdefault(token_id, f"{token_id} ({tokenizer.convert_ids_to_tokens(token_id)}, {what})")
    if added:
        logger.warning(
            "answers also end at %s: the model's configuration does not name it; --no-tokenizer-end-tokens "
            "(tokenizer_end_tokens = False) leaves it out",
            " and ".join(added.values()),
        )
    return (*ends, *added)
