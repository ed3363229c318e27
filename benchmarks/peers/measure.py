"""Rounds in turns, and batchserve over each peer, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.adaptive.driver import median_interval
from benchmarks.common import spread
from benchmarks.peers.contenders import OWN, Contender
from benchmarks.peers.environments import PeerError
from benchmarks.peers.protocol import Prompts
from benchmarks.peers.worker import Answered, Command, Worker

FEW_TOKENS = 4
SETTLE_S = 0.5  # before each turn: threads of the engine before may spin for up to 0.2 s (libiomp5's KMP_BLOCKTIME)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of one model: numbers of requests at once, rounds, tokens of an answer."""

    requests: tuple[int, ...]
    rounds: int
    max_tokens: int

    @property
    def num_prompts(self) -> int:
        """Each round has prompts of its own; one round more warms up."""
        return sum(self.requests) * (self.rounds + 1)

    def share_out(self, prompts: Prompts) -> dict[tuple[int, int], Prompts]:
        """The prompts by (round, requests)."""
        left = iter(prompts)
        return {
            (number, size): [next(left) for _ in range(size)]
            for number in range(self.rounds + 1)
            for size in self.requests
        }


@dataclass(slots=True)
class Cell:
    """All rounds of one number of requests: by contender, in the order of the rounds."""

    requests: int
    runs: dict[str, list[Answered]] = field(default_factory=dict)


def order(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of a round: each begins with another one, and odd rounds go backwards, so that neighbours change."""
    start = (number // 2) % len(contenders) if contenders else 0
    turned = [*contenders[start:], *contenders[:start]]
    return turned[::-1] if number % 2 else turned


def start(commands: Mapping[str, Command], stack: ExitStack, deadline_s: float, say: Say) -> dict[str, Worker]:
    """All engines, one after the other; a peer that does not start, or whose turn comes after deadline_s, is left out.

    Raises PeerError where it is batchserve that does not.
    """
    workers: dict[str, Worker] = {}
    for name, command in commands.items():
        if not name.startswith(OWN) and time.monotonic() > deadline_s:
            say(f"left out: {name}: starting the others took too long")
            continue
        try:
            workers[name] = stack.enter_context(Worker(command))
        except PeerError as error:
            if name.startswith(OWN):
                raise
            say(f"left out: {error}")
            continue
        say(f"  {name}: loaded in {workers[name].load_s:.1f} s")
    return workers


def measure(
    contenders: Sequence[Contender],
    workers: Mapping[str, Worker],
    plan: Plan,
    prompts: Prompts,
    deadline_s: float,
    say: Say,
) -> list[Cell]:
    """Every contender once a round, on the same prompts, after a pause; idle ones stay loaded.

    A peer that fails is left out. Just before it is timed, each answers a few tokens, so that it finds its own weights
    in the caches. The round that warms up is not counted. After deadline_s (time.monotonic's) no further round begins,
    once there is one.
    """
    taking_part = [each for each in contenders if each.worker in workers]
    cells = {size: Cell(size, {each.name: [] for each in taking_part}) for size in plan.requests}
    given = plan.share_out(prompts)
    for number in range(plan.rounds + 1):
        if number > 1 and time.monotonic() > deadline_s:
            say(f"  time is up after {number - 1} rounds")
            break
        for size in plan.requests:
            for each in order(taking_part, number):
                try:
                    worker = workers[each.worker]
                    time.sleep(SETTLE_S)
                    worker.round(given[0, size][:1], FEW_TOKENS, each.drafts)
                    answered = worker.round(given[number, size], plan.max_tokens, each.drafts)
                except PeerError as error:
                    if each.engine == OWN:
                        raise
                    say(f"left out from here on: {error}")
                    taking_part.remove(each)
                    for cell in cells.values():
                        del cell.runs[each.name]
                    continue
                if number:
                    cells[size].runs[each.name].append(answered)
    return list(cells.values())


def summary(cell: Cell, contenders: Sequence[Contender], eos: int) -> dict[str, Any]:
    """A cell as figures: each contender's tokens/s, and batchserve's over each peer's, round by round.

    same_answers: the share of answers that, up to their EOS, are those of batchserve in process or served without
    drafts; others may differ by rounding, as the engines do not add in the same order.
    """
    known = {each.name: each for each in contenders if each.name in cell.runs}
    own = {(each.way, each.drafts): cell.runs[each.name] for each in known.values() if each.engine == OWN}
    figures, ratios = {}, {}
    for name, each in known.items():
        runs, base = cell.runs[name], own[each.way, False]
        figures[name] = {
            "tokens_per_s": spread([run.tokens_per_s for run in runs]),
            "same_answers": round(same_answers(runs, base, eos), 3),
        }
        if each.engine != OWN:
            pairs = zip(own[each.way, each.drafts], runs, strict=True)
            ratios[name] = median_interval([ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs])
    return {"requests": cell.requests, "contenders": figures, "batchserve_over": ratios}


def same_answers(runs: Sequence[Answered], base: Sequence[Answered], eos: int) -> float:
    """The share of answers that are the same up to the EOS."""
    pairs = [
        (until(a, eos), until(b, eos))
        for one, other in zip(runs, base, strict=True)
        for a, b in zip(one.token_ids, other.token_ids, strict=True)
    ]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


def until(token_ids: list[int], eos: int) -> list[int]:
    return token_ids[: token_ids.index(eos)] if eos in token_ids else token_ids


def memory(workers: Mapping[str, Worker]) -> dict[str, float | None]:
    """Megabytes of each engine's process tree (proportional set size); of a server the server's alone."""
    found = {name: worker.pss_bytes() for name, worker in workers.items()}
    return {name: None if size is None else round(size / 1e6, 1) for name, size in found.items()}


def lines(name: str, cell: dict[str, Any]) -> list[str]:
    """A cell for people."""
    shown = [f"{name}, {cell['requests']} at once, tokens/s (batchserve over it, same answers):"]
    for contender, figures in cell["contenders"].items():
        rate, ratio = figures["tokens_per_s"]["median"], cell["batchserve_over"].get(contender)
        over = f"x {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""
        shown.append(f"  {contender:34} {rate:8.1f}  {over:24} {figures['same_answers']:.0%}")
    return shown
