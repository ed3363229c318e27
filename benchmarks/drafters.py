"""Every drafter in the engine, on the bundled model: acceptance length and tokens/s against none.

    python -m benchmarks.drafters [--sizes 1 4 16] [--rounds 3] [--prompts 32]

Each round answers the same held-out prompts of the model's tasks with each drafter, `size` requests at once, greedy,
interleaved in one process; a ratio is the median of the rounds' tokens/s over those without drafts. A round's requests
share a draft scope of their own, so a drafter knows what it would know on a server that has just been started. The
second part is sampling: what drafting with the sampler's own noise gains.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from batchserve import LLM, RequestOutput, SamplingParams, SpeculationParams
from batchserve.draft.mixture import MixtureDrafter
from batchserve.errors import ConfigError
from benchmarks.common import chat_prompts, refusing_bad_input, spread, write_results

DRAFTERS = ("none", "mixture", "trie", "reference", "jacobi")
TEMPERATURES = (0.5, 1.0, 1.5)
NODES = 8


def answer(
    llm: LLM, prompts: list[str], params: list[SamplingParams], speculation: SpeculationParams
) -> dict[str, Any]:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, speculation=speculation, show_progress=False)
    return {
        "tokens_per_s": sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - start),
        "acceptance_length": acceptance_length(outputs),
        "drafted": sum(o.usage.draft_tokens for o in outputs) / num_steps(outputs),
        "answers": [o.token_ids for o in outputs],
    }


def num_steps(outputs: list[RequestOutput]) -> int:
    """Verification steps: one token of each is not a draft. The token that ended an answer was given by one, too."""
    return sum(len(o.token_ids) + 1 - o.usage.accepted_draft_tokens for o in outputs)


def acceptance_length(outputs: list[RequestOutput]) -> float:
    return sum(len(o.token_ids) + 1 for o in outputs) / num_steps(outputs)


def compare(size: int, prompts: list[str], rounds: int) -> dict[str, Any]:
    """By drafter: tokens/s over none's, acceptance length, draft tokens a step; and how many answers differ."""
    llm = LLM(max_num_seqs=size, max_num_batched_tokens=4096)
    params = [SamplingParams(temperature=0.0, max_tokens=200)] * len(prompts)
    rng, runs = random.Random(0), {name: [] for name in DRAFTERS}  # type: ignore[var-annotated]
    for number in range(rounds + 1):
        for name in rng.sample(DRAFTERS, len(DRAFTERS)):
            scope = f"{name} {number}"
            run = answer(llm, prompts, params, SpeculationParams(drafter=name, draft_scope=scope))
            if number:  # the first warms up
                runs[name].append(run)
            llm.clear_draft_scope(scope)
    plain = runs["none"]
    return {
        name: {
            "over_none": spread([a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(of, plain, strict=True)]),
            "tokens_per_s": spread([run["tokens_per_s"] for run in of]),
            "acceptance_length": of[0]["acceptance_length"],
            "draft_tokens_per_step": of[0]["drafted"],
            "other_answers": sum(a != b for a, b in zip(of[0]["answers"], plain[0]["answers"], strict=True)),
        }
        for name, of in runs.items()
    }


def compare_noise(prompts: list[str]) -> dict[str, Any]:
    """Acceptance length of sampled requests, drafted as if greedy and with the sampler's noise. fp32."""
    llm = LLM(dtype="float32", max_num_seqs=4, decoding_length=NODES)
    found: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=200) for i in range(len(prompts))]
        runs = []
        for is_using_noise in (False, True):
            llm._core.drafts.drafter = MixtureDrafter(is_using_noise=is_using_noise)
            runs.append(answer(llm, prompts, params, SpeculationParams()))
        found[str(temperature)] = {
            "without_noise": runs[0]["acceptance_length"],
            "with_noise": runs[1]["acceptance_length"],
            "other_answers": sum(a != b for a, b in zip(runs[0]["answers"], runs[1]["answers"], strict=True)),
        }
    return found


@refusing_bad_input()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    args = parser.parse_args()
    if min(*args.sizes, args.rounds, args.prompts) < 1:
        raise ConfigError("--sizes, --rounds, --prompts: must be at least 1")
    prompts = chat_prompts(args.prompts, seed=5)
    noise = compare_noise(chat_prompts(2 * args.prompts, seed=6))
    print("noise", noise, flush=True)
    sizes: dict[str, Any] = {}
    for size in args.sizes:
        sizes[str(size)] = compare(size, prompts, args.rounds)
        for name, cell in sizes[str(size)].items():
            print(
                f"{size:3} {name:10} {cell['tokens_per_s']['median']:7.1f} tokens/s, {cell['over_none']['median']:.2f} "
                f"of none; {cell['acceptance_length']:.2f} a step of {cell['draft_tokens_per_step']:.1f} drafted; "
                f"{cell['other_answers']} other answers",
                flush=True,
            )
        write_results("drafters", {"rounds": args.rounds, "prompts": args.prompts, "sizes": sizes, "noise": noise})


if __name__ == "__main__":
    main()
