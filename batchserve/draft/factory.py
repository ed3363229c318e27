"""Creates drafters from the configuration. Only this module knows all drafters and their defaults."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from batchserve.config import DRAFTERS, DraftConfig
from batchserve.draft.base import Drafter, NullDrafter
from batchserve.errors import ConfigError

if TYPE_CHECKING:
    from batchserve.config import EngineConfig

# The adaptive length only bounds what each step chooses to run. The fixed length must suit a CPU, where a row costs
# about as much as it can gain. The papers' larger drafts (64 tokens for the trie) are meant for GPUs.
ADAPTIVE_DECODING_LENGTH, FIXED_DECODING_LENGTH = 64, 8
MIXTURE_BRANCH_LENGTH, TRIE_BRANCH_LENGTH = 64, 12  # the mixture may copy as many tokens as there are rows
COPY_LENGTH = 16  # LLMA's k
SHARING = ("mixture", "trie", "reference")  # drafters that keep texts for other requests
# Lookahead Decoding, section 5: W = 15, 10 and 7 for 7B, 13B and 34B models. Other sizes use the nearest of these.
JACOBI_WINDOWS = ((10e9, 15), (21e9, 10), (float("inf"), 7))
LARGEST_MODEL = 1 << 50  # parameters: assumed while the model is unknown, as it gives the smallest window
DEFAULT_NGRAM = DraftConfig().jacobi_ngram


class DraftLimits(NamedTuple):
    """The upper bounds on one request's draft in one step."""

    max_draft_tokens: int
    branch_length: int


class JacobiShape(NamedTuple):
    """W, N and G of Lookahead Decoding."""

    window: int
    ngram: int
    guesses: int


def jacobi_shape(config: DraftConfig, num_parameters: int) -> JacobiShape:
    """Returns the configured shape. The default window is the paper's for a model of this size."""
    by_size = next(window for below, window in JACOBI_WINDOWS if num_parameters < below)
    window = config.jacobi_window or by_size
    return JacobiShape(window, config.jacobi_ngram, config.jacobi_guesses or window)


def reference_copy_length(config: EngineConfig) -> int:
    """Returns the configured length, or else 16 or decoding_length, whichever is larger."""
    return config.draft.reference_copy_length or max(COPY_LENGTH, config.decoding_length or 0)


def draft_limits(config: EngineConfig, num_parameters: int) -> dict[str, DraftLimits]:
    """Returns every drafter's bounds by name: the configured ones, or else its defaults."""
    window, ngram, guesses = jacobi_shape(config.draft, num_parameters)
    copied = reference_copy_length(config)
    tree = ADAPTIVE_DECODING_LENGTH if config.is_adaptive else FIXED_DECODING_LENGTH
    own = {
        "mixture": DraftLimits(tree, MIXTURE_BRANCH_LENGTH),
        "trie": DraftLimits(tree, TRIE_BRANCH_LENGTH),
        "reference": DraftLimits(copied, copied),
        "jacobi": DraftLimits((window + guesses) * (ngram - 1), ngram - 1),
    }
    most = config.max_num_batched_tokens - 1  # one row is for the request's last token
    limits = {
        name: DraftLimits(
            min(tokens, most) if config.decoding_length is None else config.decoding_length,
            length if config.branch_length is None else config.branch_length,
        )
        for name, (tokens, length) in own.items()
    }
    return limits | {"none": DraftLimits(0, 1)}


def _checked_shape(config: EngineConfig, num_parameters: int) -> JacobiShape:
    """Returns jacobi_shape(), but raises ConfigError if a configured N is too large: memory grows with its square."""
    shape = jacobi_shape(config.draft, num_parameters)
    if shape.ngram != DEFAULT_NGRAM:
        config.check_fits("jacobi_ngram", shape.ngram, (shape.window + shape.guesses) * (shape.ngram - 1))
    return shape


def create_drafter(name: str, config: EngineConfig, num_parameters: int, part: float = 1.0) -> Drafter:
    """Returns a new drafter, without any state, that may use `part` of max_draft_bytes. Raises ConfigError."""
    limits, draft = draft_limits(config, num_parameters)[name], config.draft
    max_total_bytes = int(part * draft.max_draft_bytes)
    # Imported here because an engine without drafts needs none of these.
    if name == "mixture":
        from batchserve.draft.mixture import MixtureDrafter

        return MixtureDrafter(
            branch_length=limits.branch_length,
            max_scope_bytes=draft.max_scope_bytes,
            max_total_bytes=max_total_bytes,
        )
    if name == "trie":
        from batchserve.draft.trie import TrieDrafter

        return TrieDrafter(
            decoding_length=limits.max_draft_tokens,
            branch_length=limits.branch_length,
            capacity=draft.trie_capacity,
            mode=draft.trie_mode,
            prompt_weight=draft.trie_prompt_weight,
            min_retrieved_tokens=draft.trie_min_retrieved_tokens,
            max_scope_bytes=draft.max_scope_bytes,
            max_total_bytes=max_total_bytes,
        )
    if name == "reference":
        from batchserve.draft.reference import ReferenceDrafter

        return ReferenceDrafter(
            min_match=draft.reference_min_match,
            copy_length=reference_copy_length(config),
            max_scope_bytes=draft.max_scope_bytes,
            max_total_bytes=max_total_bytes,
        )
    if name == "jacobi":
        from batchserve.draft.jacobi import JacobiDrafter

        return JacobiDrafter(*_checked_shape(config, num_parameters))
    return NullDrafter()


def draft_parts(config: EngineConfig) -> dict[str, float]:
    """Returns the part of max_draft_bytes of each drafter that shares texts. The server's default gets a double part.

    Raises ConfigError if a part has no room for a scope.
    """
    from batchserve.draft.mixture import MIN_SCOPE_BYTES  # imported here: see create_drafter

    weights = {name: 2 if name == config.drafter else 1 for name in SHARING}
    parts = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    least = math.ceil(MIN_SCOPE_BYTES / parts["mixture"])
    if config.draft.max_draft_bytes < least:
        raise ConfigError(f"max_draft_bytes = {config.draft.max_draft_bytes}: must be at least {least}")
    return parts


def create_drafters(config: EngineConfig, num_parameters: int) -> dict[str, Drafter]:
    """Returns all drafters by name, as a request may choose any of them. Raises ConfigError."""
    if config.decoding_length == 0:
        return {name: NullDrafter() for name in DRAFTERS}
    parts = draft_parts(config)
    return {name: create_drafter(name, config, num_parameters, parts.get(name, 0.0)) for name in DRAFTERS}
