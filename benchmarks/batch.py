"""tokens/s and step time by batch size: speculation off, on (adaptive, and each fixed length), transformers' generate.

    python -m benchmarks.batch [--models bundled 90m] [--sizes 1 2 4 8 16] [--rounds 7]

All contenders run in one process, interleaved round by round, each round over prompts of its own, the same ones for
all, and in the same dtype; a ratio is the median of the rounds' ratios. transformers runs a static batch, left-padded,
SDPA attention. The bundled model ends where it ends (EOS); the random-weight model goes on for --tokens tokens. End to
end: prefill is in.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import chat_prompts, spread, write_results

import torch  # isort: skip
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList  # isort: skip

from batchserve import LLM, SamplingParams, SpeculationParams
from batchserve.runner.model_folder import resolve_model
from tools.widen_model import random_model, save

LENGTHS = (1, 2, 4, 8, 16)
FEW_TOKENS = 8


@dataclass
class Run:
    """One measured batch."""

    tokens: int
    seconds: float
    step_s: float
    acceptance_length: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class _StepClock(StoppingCriteria):
    """Notes the time of every step of generate()."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def median_gap(times: list[float]) -> float:
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else float("nan")


@torch.inference_mode()
def run_transformers(model: Any, prompts: list[list[int]], params: SamplingParams, threads: int) -> Run:
    max_tokens, ignore_eos = params.max_tokens or 1, params.ignore_eos
    torch.set_num_threads(threads)
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    clock = _StepClock()
    options: dict[str, Any] = {"min_new_tokens": max_tokens} if ignore_eos else {}
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
        **options,
    )
    seconds = time.perf_counter() - start
    tokens = 0
    for row in out[:, longest:].tolist():
        tokens += row.index(1) if 1 in row and not ignore_eos else len(row)
    return Run(tokens, seconds, median_gap(clock.times))


def run_batchserve(llm: LLM, prompts: list[list[int]], params: SamplingParams, draft_tokens: int | None) -> Run:
    """draft_tokens: the most of a request in a step; None: as many as the engine makes of its own."""
    times: list[float] = []
    core = llm._core
    step = core.step

    def timed() -> None:
        step()
        times.append(time.perf_counter())

    core.step = timed  # type: ignore[method-assign]
    speculation = SpeculationParams(draft_tokens != 0, draft_tokens or None)
    before = core.metrics.snapshot()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, speculation=speculation, show_progress=False)
    seconds = time.perf_counter() - start
    del core.step
    after = core.metrics.snapshot()
    decoded = after["decoding_requests_total"] - before["decoding_requests_total"]
    accepted = after["accepted_draft_tokens_total"] - before["accepted_draft_tokens_total"]
    tokens = sum(len(o.token_ids) for o in outputs)
    return Run(tokens, seconds, median_gap(times), 1 + accepted / max(1, decoded))


def measure(
    llms: tuple[LLM, LLM], model: Any, batches: list[list[list[int]]], params: SamplingParams
) -> dict[str, Any]:
    """Every contender once a round, in a new order each time; the first round warms up and is not counted.

    Just before it is timed each runs a few tokens, so that it finds its own weights in the caches and not another's.
    llms: with the adaptive decoding length, and with fixed ones. batches: the prompts of each round.
    """
    adaptive, fixed = llms
    contenders: dict[str, Any] = {
        f"transformers_{n}_threads": lambda prompts, params, n=n: run_transformers(model, prompts, params, n)
        for n in {1, os.cpu_count() or 1}
    }
    contenders["off"] = lambda prompts, params: run_batchserve(fixed, prompts, params, 0)
    contenders["on"] = lambda prompts, params: run_batchserve(adaptive, prompts, params, None)
    for length in LENGTHS:
        contenders[f"on_{length}"] = lambda prompts, params, n=length: run_batchserve(fixed, prompts, params, n)
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    rng, few = random.Random(0), replace(params, max_tokens=FEW_TOKENS)
    for number, prompts in enumerate(batches):
        for name in rng.sample(list(contenders), len(contenders)):
            contenders[name](batches[0][:1], few)
            run = contenders[name](prompts, params)
            if number:
                runs[name].append(run)

    def speed(name: str) -> float:
        """Of all rounds together, as their texts differ."""
        return sum(run.tokens for run in runs[name]) / sum(run.seconds for run in runs[name])

    best = max(LENGTHS, key=lambda n: speed(f"on_{n}"))
    # transformers, too, gets the number of threads that suits it best.
    runs["transformers"] = runs[max((n for n in runs if n.startswith("transformers")), key=speed)]
    return {
        "best_length": best,
        "off_over_transformers": ratio(runs["off"], runs["transformers"]),
        "on_over_off": ratio(runs["on"], runs["off"]),
        "on_over_transformers": ratio(runs["on"], runs["transformers"]),
        "on_over_best_length": ratio(runs["on"], runs[f"on_{best}"]),
        "contenders": {
            name: {
                "tokens_per_s": spread([r.tokens_per_s for r in of]),
                "step_ms": spread([r.step_s * 1e3 for r in of]),
                "tokens": sum(r.tokens for r in of),
                "acceptance_length": round(statistics.mean(r.acceptance_length for r in of), 3),
            }
            for name, of in runs.items()
        },
    }


def ratio(a: list[Run], b: list[Run]) -> dict[str, float]:
    """Round by round: tokens/s of a over b."""
    return spread([x.tokens_per_s / y.tokens_per_s for x, y in zip(a, b, strict=True)])


def _llm(source: str, **options: Any) -> LLM:
    return LLM(source, max_num_batched_tokens=2560, default_draft_scope="request", **options)


def workload(name: str, size: int, rounds: int, tokens: int, llm: LLM) -> tuple[list[list[list[int]]], SamplingParams]:
    """Prompts for as many rounds, and one more that warms up."""
    rng, count = random.Random(size), size * (rounds + 1)
    if name == "bundled":
        prompts = [llm._processor.tokenize(text) for text in chat_prompts(count, seed=size)]
        params = SamplingParams(temperature=0.0, max_tokens=200)
    else:
        prompts = [[rng.randrange(3, llm.info.vocab_size) for _ in range(128)] for _ in range(count)]
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [prompts[start : start + size] for start in range(0, count, size)], params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bundled", "90m"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            source = name
            if name != "bundled":
                source = str(Path(folder) / name)
                save(random_model(name), Path(source))
            # Contenders repeat their prompts: with shared drafts one would be told the answers by another.
            llm = _llm(source, dtype=args.dtype)
            threads = llm._core.executor.num_threads  # what was chosen at start, where noise may decide
            fixed = _llm(source, dtype=args.dtype, num_threads=threads, decoding_length=max(LENGTHS))
            dtype = getattr(torch, llm.info.dtype)
            model = AutoModelForCausalLM.from_pretrained(resolve_model(source), dtype=dtype).eval()
            results[name] = {"dtype": llm.info.dtype, "sizes": {}}
            for size in args.sizes:
                batches, params = workload(name, size, args.rounds, args.tokens, llm)
                cell = measure((llm, fixed), model, batches, params)
                results[name]["sizes"][size] = cell
                print(describe(name, size, cell), flush=True)
                write_results(f"batch_{name}", {"rounds": args.rounds, **results[name]})


def describe(name: str, size: int, cell: dict[str, Any]) -> str:
    by = cell["contenders"]
    on, best = by["on"], by[f"on_{cell['best_length']}"]
    return (
        f"{name:8} B={size:<3} tokens/s: transformers {by['transformers']['tokens_per_s']['median']:7.1f}  "
        f"off {by['off']['tokens_per_s']['median']:7.1f}  on {on['tokens_per_s']['median']:7.1f}  "
        f"({cell['best_length']}: {best['tokens_per_s']['median']:7.1f})  "
        f"step ms: {by['transformers']['step_ms']['median']:6.2f} {by['off']['step_ms']['median']:6.2f} "
        f"{on['step_ms']['median']:6.2f}  accept {on['acceptance_length']:.2f}  "
        f"off/hf {cell['off_over_transformers']['median']:.2f}  on/off {cell['on_over_off']['median']:.2f}"
    )


if __name__ == "__main__":
    main()
