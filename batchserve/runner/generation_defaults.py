"""Reads a model's generation_config.json: turns it into defaults of requests, and warns of what is not applied."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from batchserve.errors import ConfigError, InvalidRequestError
from batchserve.types import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import GenerationConfig

logger = logging.getLogger(__name__)
GENERATION_CONFIG_NAME = "generation_config.json"
SAMPLED, ALWAYS = ("temperature", "top_k", "top_p", "min_p"), ("repetition_penalty", "no_repeat_ngram_size")
APPLIED_OR_HARMLESS = frozenset(
    "temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size do_sample "
    "eos_token_id bos_token_id pad_token_id decoder_start_token_id "
    "transformers_version use_cache output_attentions output_hidden_states return_dict_in_generate "
    "cache_implementation chat_format max_window_size trust_remote_code".split()
)


def check_readable(folder: Path) -> None:
    """Raises ConfigError if generation_config.json is damaged. transformers would go on without it."""
    file = folder / GENERATION_CONFIG_NAME
    if not file.exists():
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must hold an object, not {type(content).__name__}")


def sampling_defaults(defaults: GenerationConfig) -> dict[str, float]:
    """Returns the defaults of requests' parameters by name: greedy, unless generation_config.json samples.

    Raises ConfigError.
    """
    names = (*SAMPLED, *ALWAYS) if defaults.do_sample else ALWAYS
    found = {name: value for name in names if (value := getattr(defaults, name, None)) is not None}
    if defaults.do_sample:
        found.setdefault("temperature", 1.0)
    try:
        params = SamplingParams(**found)
    except InvalidRequestError as error:
        raise ConfigError(f"{GENERATION_CONFIG_NAME}: {error}") from error
    return {name: getattr(params, name) for name in found}


def warn_of_unapplied(defaults: GenerationConfig, max_model_len: int) -> None:
    """Warns of options that generate() would apply and batchserve does not, instead of silently ignoring them."""
    changed = defaults.to_diff_dict()
    longest = changed.get("max_length")
    if isinstance(longest, int) and longest >= max_model_len:  # it cuts no answer short
        del changed["max_length"]
    names = sorted(name for name in set(changed) - APPLIED_OR_HARMLESS if not name.startswith("_"))
    if names:
        asked = ", ".join(f"{name} = {changed[name]!r}" for name in names)
        logger.warning("not applied, though %s asks for it: %s", GENERATION_CONFIG_NAME, asked)


def eos_token_ids(from_generation: object, text_config: object, vocab_size: int) -> tuple[int, ...]:
    """Returns the EOS ids of generation_config.json, or of the model's configuration if the former has none.

    Raises ConfigError for values that are not token ids. Warns of ids outside the vocabulary, as -1 may mean none.
    """
    found = from_generation if from_generation is not None else getattr(text_config, "eos_token_id", None)
    given = found if isinstance(found, list) else [] if found is None else [found]
    ids = [each for each in given if isinstance(each, int) and not isinstance(each, bool)]
    if len(ids) < len(given):
        raise ConfigError(f"eos_token_id = {found!r}: must be a token id, or a list of them")
    known = tuple(each for each in ids if 0 <= each < vocab_size)
    if len(known) < len(ids):
        logger.warning("eos_token_id = %s: only ids in 0..%d end an answer", found, vocab_size - 1)
    return known
