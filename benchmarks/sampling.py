"""What choosing tokens costs on a CPU: rows of logits by the sampler, and by NumPy as the definition is written.

    python -m benchmarks.sampling [--rounds 30]

Logits are made up, bfloat16, of vocabularies as models have them: five tokens stand out of a bell curve, but in the
last setting, whose nucleus has a good part of the vocabulary. Milliseconds for 40 rows, as 16 requests with drafts
reach in a step, the two in turn, on one thread; and by the sampler on all of torch's. And tokens a second of the
bundled model at 16 requests, over those of greedy requests in the same rounds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from batchserve import LLM, SamplingParams, SpeculationParams
from benchmarks.common import chat_prompts, spread, write_results

import numpy as np  # isort: skip
import torch  # isort: skip

from batchserve.request import ResolvedSampling
from batchserve.runner.ragged_batch import RaggedBatch, RequestRows, build_batch
from batchserve.runner.step_handle import verify_batch
from batchserve.sampling.argmax_kernel import compile_kernels as compile_argmax
from batchserve.sampling.draw_kernel import compile_kernels as compile_draws
from batchserve.sampling.recordings import Recordings
from batchserve.sampling.sampled_walk import compile_kernels as compile_walks
from batchserve.sampling.sampler import sample_by_definition

ROWS, SIZES = 40, (8192, 32000, 128256)
SETTINGS = {
    "greedy": (0.0, 0, 1.0),
    "temperature 0.7": (0.7, 0, 1.0),
    "top_k 40": (0.7, 40, 1.0),
    "top_p 0.9": (0.7, 0, 0.9),
    "top_k 40, top_p 0.9": (0.7, 40, 0.9),
}
FLAT = "top_p 0.9, nothing stands out"
REQUESTS, ANSWERS, TOKENS = 16, 48, 64


def plain(logits: torch.Tensor, sampling: ResolvedSampling) -> list[int]:
    if sampling.temperature == 0.0:
        tokens: list[int] = logits.float().numpy().argmax(axis=-1).tolist()
        return tokens
    return [sample_by_definition(logits[row].float().numpy(), row + 1, sampling) for row in range(len(logits))]


def ours(batch: RaggedBatch, logits: np.ndarray, num_threads: int) -> list[int]:
    """As a step does it, of as many requests; each at a position of its own."""
    verified = verify_batch(batch, logits, Recordings(), num_threads=num_threads)
    return [each.token_ids[0] for each in verified if each is not None]


def rows(vocab_size: int, rounds: int, all_threads: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    threads = {"ours_ms": 1, "plain_ms": 1, "shared_ms": all_threads}
    found: dict[str, Any] = {}
    for name, (temperature, top_k, top_p) in {**SETTINGS, FLAT: (0.7, 0, 0.9)}.items():
        sampling = ResolvedSampling(temperature, top_k, top_p, 3, 1, frozenset())
        batch = build_batch([RequestRows(str(row), row, [0], [-1], 1, sampling) for row in range(ROWS)])
        times: dict[str, list[float]] = {contender: [] for contender in threads}
        for _ in range(rounds):
            logits = 2.5 * torch.randn(ROWS, vocab_size, generator=generator)
            if name != FLAT:
                logits[:, torch.randint(vocab_size, (5,), generator=generator)] += 12.0
            halves = logits.to(torch.bfloat16)
            wholes = halves.float().numpy()
            given = []
            for contender, num_threads in threads.items():
                torch.set_num_threads(num_threads)
                began_s = time.perf_counter()
                given.append(plain(halves, sampling) if contender == "plain_ms" else ours(batch, wholes, num_threads))
                times[contender].append(1e3 * (time.perf_counter() - began_s))
            if not given[0] == given[1] == given[2]:
                raise RuntimeError(f"{name}, {vocab_size} tokens: {given}")
        ratios = [a / b for a, b in zip(times["ours_ms"], times["plain_ms"], strict=True)]
        found[name] = {contender: spread(taken) for contender, taken in times.items()} | {"ratio": spread(ratios)}
        print(vocab_size, name, {part: round(cell["median"], 3) for part, cell in found[name].items()}, flush=True)
    return found


def engine(rounds: int) -> dict[str, Any]:
    """Tokens a second of every setting over greedy ones, with drafts and without."""
    llm, prompts = LLM(max_num_seqs=REQUESTS), chat_prompts(ANSWERS, seed=11)
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for drafts in ("off", "adaptive"):
            for name, (temperature, top_k, top_p) in SETTINGS.items():
                params = [
                    SamplingParams(
                        temperature=temperature, top_k=top_k, top_p=top_p, seed=i, max_tokens=TOKENS, ignore_eos=True
                    )
                    for i in range(len(prompts))
                ]
                speculation = SpeculationParams(drafts == "adaptive")
                began_s = time.perf_counter()
                llm.generate(prompts, params, speculation=speculation, show_progress=False)
                if number:  # the first round warms up
                    rate = ANSWERS * TOKENS / (time.perf_counter() - began_s)
                    rates.setdefault((drafts, name), []).append(rate)
    return {
        drafts: {
            name: {
                "tokens_per_s": spread(rates[drafts, name]),
                "over_greedy": spread(
                    [a / b for a, b in zip(rates[drafts, name], rates[drafts, "greedy"], strict=True)]
                ),
            }
            for name in SETTINGS
        }
        for drafts in ("off", "adaptive")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    compile_argmax()
    compile_draws()
    compile_walks()
    threads = torch.get_num_threads()
    cells = {str(size): rows(size, args.rounds, threads) for size in SIZES}
    torch.set_num_threads(threads)
    found = engine(max(1, args.rounds // 6))
    for drafts, settings in found.items():
        print(drafts, {name: round(cell["over_greedy"]["median"], 3) for name, cell in settings.items()}, flush=True)
    write_results(
        "sampling", {"rows": ROWS, "threads": threads, "vocabularies": cells, "requests": REQUESTS, "engine": found}
    )


if __name__ == "__main__":
    main()
