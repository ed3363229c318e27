"""How lossless the default level is, and what `batch_invariant` costs.

    python -m benchmarks.lossless [--prompts 600] [--rounds 5] [--parts count price]

Speculation on (16 requests at once) against off (4 at once) on the bundled model's own tasks, greedy and sampled, in
fp32 and bf16. A request is compared up to its first difference; there plain transformers forwards, one in fp32 and
one in the engine's dtype, say whether the token is a near-tie (batchserve/sampling/near_tie.py) or wrong: both counts
are kept, for a forward in bf16 is rounded itself. Under `batch_invariant` there must be none.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from benchmarks.common import RESULTS, chat_prompts, spread, write_results

import torch  # isort: skip
from transformers import AutoModelForCausalLM  # isort: skip

from batchserve import LLM, RequestOutput, SamplingParams, SpeculationParams
from batchserve.demo.measure import first_difference
from batchserve.runner.model_folder import resolve_model
from batchserve.sampling.near_tie import is_near_tie, rounding_bound

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "sampled_hot": {"temperature": 1.2},
}


def parameters(mode: str, count: int) -> list[SamplingParams]:
    return [SamplingParams(**MODES[mode], seed=i, max_tokens=160) for i in range(count)]


class Judge:
    """Says whether a token that differs could be rounding's fault, by the logits of a forward in `dtype`."""

    def __init__(self, llm: LLM, dtype: str) -> None:
        self.llm = llm
        self.model = AutoModelForCausalLM.from_pretrained(resolve_model("bundled"), dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def judge(self, output: RequestOutput, place: int, params: SamplingParams) -> dict[str, Any]:
        """The bound is that of the engine's dtype; the loss is in logits, before any noise."""
        ids = output.prompt_token_ids + output.token_ids[:place]
        logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().numpy()
        token = output.token_ids[place] if place < len(output.token_ids) else self.llm.info.eos_token_ids[0]
        sampling = self.llm._processor.resolve(params, len(output.prompt_token_ids))
        bound = rounding_bound(self.llm.info.dtype, logits)
        return {
            "is_near_tie": is_near_tie(logits, token, len(ids), sampling, bound),
            "loss": round(float(logits.max() - logits[token]), 4),
            "bound": round(bound, 4),
        }


def compare(
    llm: LLM, on: list[RequestOutput], off: list[RequestOutput], params: list[SamplingParams]
) -> dict[str, Any]:
    in_fp32, in_dtype = Judge(llm, "float32"), Judge(llm, llm.info.dtype)
    tokens, differences = 0, []
    for number, (a, b, param) in enumerate(zip(on, off, params, strict=True)):
        place = first_difference(a.token_ids, b.token_ids)
        tokens += len(a.token_ids) if place is None else place + 1
        if place is not None:
            by = {"fp32": in_fp32.judge(a, place, param), "dtype": in_dtype.judge(a, place, param)}
            differences.append({"prompt": number, "place": place, **by})
    near_ties = sum(each["fp32"]["is_near_tie"] for each in differences)
    return {
        "tokens_compared": tokens,
        "near_ties": near_ties,
        "near_ties_per_million": round(near_ties / tokens * 1e6, 1),
        "wrong_tokens": len(differences) - near_ties,
        "wrong_by_a_forward_in_its_dtype": sum(not each["dtype"]["is_near_tie"] for each in differences),
        "differences": differences,
    }


def engine(dtype: str, seqs: int, *, invariant: bool) -> LLM:
    return LLM("bundled", dtype=dtype, max_num_seqs=seqs, batch_invariant=invariant, decoding_length=8)


def generate(llm: LLM, prompts: list[str], params: list[SamplingParams], *, on: bool) -> list[RequestOutput]:
    return llm.generate(prompts, params, speculation=SpeculationParams(on), show_progress=False)


def price(dtype: str, prompts: list[str], rounds: int) -> dict[str, Any]:
    """tokens/s of batch_invariant over the default level, in pairs, speculation off and on."""
    engines = {name: engine(dtype, 16, invariant=name == "invariant") for name in ("default", "invariant")}
    ratios: dict[str, list[float]] = {"off": [], "on": []}
    rng = random.Random(0)
    for number in range(rounds + 1):
        for mode in ratios:
            seconds = {}
            for name in rng.sample(list(engines), 2):
                start = time.perf_counter()
                generate(engines[name], prompts, parameters("greedy", len(prompts)), on=mode == "on")
                seconds[name] = time.perf_counter() - start
            if number:  # the first round warms up
                ratios[mode].append(seconds["default"] / seconds["invariant"])
    return {mode: spread(values) for mode, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--parts", nargs="+", choices=("count", "price"), default=["count", "price"])
    args = parser.parse_args()
    prompts = chat_prompts(args.prompts, seed=99)
    for dtype in args.dtypes:
        path = RESULTS / f"lossless_{dtype}.json"
        result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if "count" in args.parts:
            result = {**result, "prompts": args.prompts, **count(dtype, prompts)}
        if "price" in args.parts:
            result["batch_invariant_over_default_tokens_per_s"] = price(dtype, prompts[:64], args.rounds)
            print(dtype, "price", result["batch_invariant_over_default_tokens_per_s"], flush=True)
        write_results(path.stem, {name: value for name, value in result.items() if name != "environment"})


def count(dtype: str, prompts: list[str]) -> dict[str, Any]:
    """Near-ties and wrong tokens by level and kind of sampling."""
    result: dict[str, Any] = {}
    for level in ("default", "batch_invariant"):
        off_engine, on_engine = (engine(dtype, seqs, invariant=level == "batch_invariant") for seqs in (4, 16))
        result[level] = {}
        for mode in MODES:
            params = parameters(mode, len(prompts))
            off = generate(off_engine, prompts, params, on=False)
            on = generate(on_engine, prompts, params, on=True)
            result[level][mode] = compare(on_engine, on, off, params)
            print(dtype, level, mode, result[level][mode], flush=True)
    return result


if __name__ == "__main__":
    main()
