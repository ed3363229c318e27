"""Small makers of what most tests need: settings of properties, sampling parameters, requests, random trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings

from batchserve.config import EngineConfig
from batchserve.draft.base import DraftTree
from batchserve.draft.factory import draft_limits
from batchserve.engine.input_processor import InputProcessor, ModelFacts
from batchserve.request import Request, ResolvedSampling, ResolvedSpeculation
from batchserve.types import SpeculationParams

if TYPE_CHECKING:
    import torch


def examples(count: int, **more: Any) -> settings:
    """Settings of a property: the same examples in every run, however slow the machine is."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=slow, **more)


def make_sampling(**changes: Any) -> ResolvedSampling:
    defaults: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "max_tokens": 16,
        "end_token_ids": frozenset(),
    }
    return ResolvedSampling(**{**defaults, **changes})


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    speculation: ResolvedSpeculation | None = None,
    deadline_s: float | None = None,
    is_whole: bool = False,
    is_sharing_early: bool = False,
    **sampling: Any,
) -> Request:
    params, drafts = make_sampling(**sampling), speculation or ResolvedSpeculation()
    given = {"is_whole": is_whole, "is_sharing_early": is_sharing_early}
    return Request(request_id, prompt, params, 0.0, drafts, deadline_s, **given)


def resolve_speculation(config: EngineConfig, params: SpeculationParams | None = None) -> ResolvedSpeculation:
    """What a server with these options makes of a request's speculation."""
    facts = ModelFacts("model", 1 << 16, (), {})
    return InputProcessor(facts, 0, config, draft_limits(config, 0)).resolve_speculation(params or SpeculationParams())


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def random_tree(rng: random.Random, num_nodes: int, vocab_size: int) -> DraftTree:
    """A valid tree of at most `num_nodes` nodes; chains and bushes are both likely."""
    tree, used = DraftTree(), set()
    for _ in range(num_nodes):
        newest = len(tree) - 1
        parent = rng.choice([newest, newest, rng.randint(-1, newest)])
        token = rng.randrange(vocab_size)
        if (parent, token) not in used:
            used.add((parent, token))
            tree.add(token, parent)
    return tree


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which batchserve knows it."""
    return str(dtype).removeprefix("torch.")


def tensor_planes(allocator: Any, request_id: str, layer: int) -> list[torch.Tensor]:
    """K and V of one layer as tensors over the allocator's memory."""
    import torch  # which some processes never need

    dtype = getattr(torch, allocator.dtype)
    return [torch.from_numpy(plane).view(dtype) for plane in allocator.planes(request_id, layer)]
