"""(d, the other half) transformers' own generate() on the same shape, in the same run.

Decode tokens/s: the time of an answer less that of its first token, so that prompts do not count, as in the replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from benchmarks.gpu import answers
from benchmarks.gpu.kit import Kit, Report
from benchmarks.gpu.models import random_llama, shape_names

TOKENS, TIMED_RUNS = 64, 3
LOOKUP_TOKENS = 10  # transformers' own default


class Recorded(LogitsProcessor):
    """Forces a recorded answer, for prompt lookup to find in it what it would have found. For one request."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._token_ids[place] if place < len(self._token_ids) else 0] = 0.0
        return forced


def run(kit: Kit, report: Report) -> None:
    shape = shape_names(kit)[0]
    name = answers.set_names(kit.replay)[0]
    sizes: tuple[int, ...] = kit.pick((1, 2, 4, 8, 16, 32), (1, 2))
    continuous: tuple[int, ...] = kit.pick((32, 1, 4, 16, 8, 2), ())  # on a CPU its K/V would take most of the memory
    static, plain = "generate, static and compiled", "generate"
    of_sizes = {plain: sizes, static: sizes, "continuous batching": continuous}
    if not report.wants("prompt lookup/b1", *(f"{kind}/b{size}" for kind, some in of_sizes.items() for size in some)):
        return
    bench = report.build(shape, partial(Baseline, kit, shape, name))
    if bench is None:
        return
    report.about(shape=shape, set=name, tokens=bench.tokens, mean_prompt_tokens=bench.mean_prompt)
    report.about(compiles=[f"{static}/b{size}" for size in sizes])
    for size in sizes[:3]:
        report.cell(f"{plain}/b{size}", partial(bench.generate, size))
    report.cell("prompt lookup/b1", bench.prompt_lookup)
    for size in continuous[:1]:
        report.cell(f"continuous batching/b{size}", partial(bench.continuous, size))
    # Nobody knows how long compiling takes: what is behind it may be left out.
    report.cell(f"{static}/b{sizes[0]}", partial(bench.generate, sizes[0], "static"))
    for kind, cache, some in ((plain, None, sizes[3:]), (static, "static", sizes[1:])):
        for size in some:
            report.cell(f"{kind}/b{size}", partial(bench.generate, size, cache))
    for size in continuous[1:]:
        report.cell(f"continuous batching/b{size}", partial(bench.continuous, size))


class Baseline:
    """One model in bf16 with transformers' SDPA attention."""

    def __init__(self, kit: Kit, shape: str, name: str) -> None:
        self._kit, self.tokens = kit, kit.pick(TOKENS, 24)
        self._model = random_llama(kit, shape, "sdpa")
        records = answers.load(kit.replay, name)
        # The records that the replay measures: those behind the ones that drafters have seen.
        self._records = [r for r in records[len(records) * 3 // 5 :] if len(r.response_token_ids) > self.tokens]
        self._records = self._records or records
        self.mean_prompt = round(sum(len(r.prompt_token_ids) for r in self._records) / len(self._records), 1)

    def generate(self, size: int, cache: str | None = None) -> dict[str, Any]:
        """A batch whose prompts are padded on the left to the longest."""
        prompts = [self._records[i % len(self._records)].prompt_token_ids for i in range(size)]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self._kit.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._kit.device)
        more = {} if cache is None else {"cache_implementation": cache}

        def answer(count: int) -> int:
            options = {**more, **self._greedy(count)}
            with torch.inference_mode():
                out = self._model.generate(ids, attention_mask=mask, **options)
            return size * (out.shape[1] - longest)

        # The first run of a compiled model compiles it, for the lengths of cache that a run goes through.
        return self._decode_rate(answer, self.tokens if cache == "static" else 2)

    def prompt_lookup(self) -> dict[str, Any]:
        """Recorded answers forced, so that as much is accepted as would have been."""
        rates: list[float] = []
        for record in self._records[: self._kit.pick(6, 1)]:
            ids = torch.tensor([record.prompt_token_ids], device=self._kit.device)
            forced = LogitsProcessorList([Recorded(record.prompt_token_ids + record.response_token_ids)])

            def answer(count: int) -> int:
                options = {**self._greedy(count), "prompt_lookup_num_tokens": LOOKUP_TOKENS, "logits_processor": forced}  # noqa: B023
                with torch.inference_mode():
                    out = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # noqa: B023
                return int(out.shape[1] - ids.shape[1])  # noqa: B023

            rates.append(self._decode_rate(answer, 0 if rates else 2)["tokens_per_s"])
        return {"tokens_per_s": round(len(rates) / sum(1 / rate for rate in rates), 2), "records": len(rates)}

    def continuous(self, size: int) -> dict[str, Any]:
        prompts = [self._records[i % len(self._records)].prompt_token_ids for i in range(size)]

        # Each call sets up its memory and graphs anew: what decoding takes is read from the tokens' own times.
        config = GenerationConfig(**self._greedy(self.tokens))
        attention = self._model.config._attn_implementation
        try:
            found = self._model.generate_batch(
                prompts, generation_config=config, progress_bar=False, record_timestamps=True
            )
        finally:  # where it fails early, it leaves its own attention in the model
            self._model.set_attn_implementation(attention)
            self._kit.free()  # what it had for K/V is most of the device's memory
        if len(found) != size:
            raise RuntimeError(f"{len(found)} of {size} requests were answered")
        return continuous_rate([each.timestamps for each in found.values()])

    def _greedy(self, count: int) -> dict[str, Any]:
        return {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}

    def _decode_rate(self, answer: Callable[[int], int], warm_up: int = 2) -> dict[str, Any]:
        """answer(count) makes so many tokens for each request and returns how many there are in all."""
        began_s = time.perf_counter()
        if warm_up:
            answer(warm_up)
        warm_up_s = time.perf_counter() - began_s
        # A compiled model may record its graphs again in the midst of an answer: the fastest of several counts.
        tokens: dict[int, int] = {}
        runs: dict[int, list[float]] = {1: [], self.tokens: []}
        for count in (1, self.tokens) * TIMED_RUNS:
            self._kit.beat()
            self._kit.sync()
            began_s = time.perf_counter()
            tokens[count] = answer(count)
            self._kit.sync()
            runs[count].append(time.perf_counter() - began_s)
        seconds = {count: min(times) for count, times in runs.items()}
        decode_s = seconds[self.tokens] - seconds[1]
        if decode_s <= 0:
            raise RuntimeError(f"{self.tokens} tokens took no longer than one: {seconds}")
        return {
            "tokens_per_s": round((tokens[self.tokens] - tokens[1]) / decode_s, 2),
            "first_token_s": round(seconds[1], 4),
            "whole_s": round(seconds[self.tokens], 4),
            "whole_s_of_each": [round(each, 4) for each in runs[self.tokens]],
            "warm_up_s": round(warm_up_s, 2),
        }


def continuous_rate(moments: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Tokens/s while all requests were decoding, from the moments of each one's tokens."""
    began_s, ended_s = max(each[0] for each in moments), min(each[-1] for each in moments)
    if ended_s <= began_s:
        raise RuntimeError(f"the requests never decoded together: from {began_s} to {ended_s}")
    tokens = sum(began_s < moment <= ended_s for each in moments for moment in each)
    return {"tokens_per_s": round(tokens / (ended_s - began_s), 2), "tokens": tokens}
