"""(b) Answers on the device: speculation on against off, both against transformers, near-ties counted.

Every token of every answer is also re-scored by transformers, given the tokens before it: it wins, or loses by less
than the rounding bound of batchserve.sampling.near_tie. A token that does neither is an error.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from batchserve.request import ResolvedSampling
from batchserve.runner.loader import resolve_model
from batchserve.sampling.near_tie import is_near_tie, rounding_bound
from batchserve.types import FinishReason
from benchmarks.gpu.kit import Kit, Report
from benchmarks.gpu.models import all_backends, graph_modes
from benchmarks.gpu.modules import is_ready, stock, variant
from tests.equivalence.harness import Answer, Coverage, Job, build, first_difference, random_jobs
from tests.equivalence.harness import run as run_jobs
from tests.tiny_models import save_tiny_model

BUNDLED = "bundled"
TINY = ("llama", "gemma2", "qwen3", "mistral", "phi3", "gpt2", "deepseek_v3", "gpt_oss")
WIDE = {"llama", "gemma2", "qwen3", "mistral", "phi3"}  # those that can be given a head_dim that FlashInfer has
HEAD_DIM = 64
# What FlashInfer needs for a model beyond the plain modules of its head_dim.
NEEDS = {
    "mistral": [stock(HEAD_DIM, torch.bfloat16, has_window=True)],
    "gemma2": [
        stock(HEAD_DIM, torch.bfloat16, has_softcap=True),
        stock(HEAD_DIM, torch.bfloat16, has_softcap=True, has_window=True),
        variant(HEAD_DIM, torch.bfloat16, has_softcap=True),
    ],
}
TEMPERATURE = 0.8
# Windows whose rows are not verified; and so little K/V that requests are preempted.
WAYS = {"/jacobi": {"drafter": "jacobi"}, "/little K/V": {"max_model_len": 400, "kv_cache_memory": 1000 * 3072}}


def run(kit: Kit, report: Report) -> None:
    models, dtypes = (BUNDLED, *kit.pick(TINY, TINY[:1])), (torch.float32, torch.bfloat16)[: kit.pick(2, 1)]
    for model in models:
        for dtype in dtypes:
            _compare_all(kit, report, model, dtype, {"": {}})
    modes = {f"/{mode}": options for mode, options in graph_modes(kit).items() if options}
    _compare_all(kit, report, BUNDLED, dtypes[-1], WAYS)
    _compare_all(kit, report, BUNDLED, dtypes[-1], modes)  # last: compiling takes minutes


def _compare_all(kit: Kit, report: Report, model: str, dtype: torch.dtype, ways: Mapping[str, dict[str, Any]]) -> None:
    """Every backend that can serve the model, in each of these ways."""
    place = f"{model}/{str(dtype).removeprefix('torch.')}"
    cells = {
        f"{place}/{backend}{way}": {**options, **more}
        for way, more in ways.items()
        for backend, options in backends(kit, model, dtype).items()
    }
    if not report.wants(*cells):
        return
    plain = report.build(place, partial(PlainPath, kit, model, dtype))
    if plain is not None:
        for name, options in cells.items():
            report.cell(name, partial(compare, kit, plain, options))
    kit.free()


def backends(kit: Kit, model: str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Those that can serve the model; torch and triton for fp32, which FlashInfer has not."""
    found = all_backends(kit, HEAD_DIM, dtype)
    if model not in (BUNDLED, *WIDE) or not all(is_ready(kit, module) for module in NEEDS.get(model, ())):
        found = {name: options for name, options in found.items() if not name.startswith("flashinfer")}
    if dtype == torch.float32 and not kit.is_dry:
        found["torch"] = {"device": "cuda", "attention_backend": "torch"}
    return found


def folder_of(kit: Kit, model: str) -> Path:
    if model == BUNDLED:
        return Path(resolve_model(BUNDLED))
    folder = kit.scratch / f"tiny-{model}"
    return folder if folder.exists() else save_tiny_model(model, folder, **_wider(model))


def _wider(model: str) -> dict[str, int]:
    if model not in WIDE:
        return {}
    if model == "phi3":  # its head_dim follows from these
        return {"hidden_size": 4 * HEAD_DIM}
    return {"head_dim": HEAD_DIM}


class PlainPath:
    """transformers itself on the device, one request at a time: the truth."""

    def __init__(self, kit: Kit, name: str, dtype: torch.dtype) -> None:
        self.folder, self.device = folder_of(kit, name), kit.device
        self.dtype = str(dtype).removeprefix("torch.")
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, attn_implementation="eager")
        self._model = model.eval().to(self.device)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def greedy(self, prompt: list[int], max_tokens: int, end_token_ids: frozenset[int]) -> list[int]:
        """The answer without its end token, by generate(); asked for again by every backend."""
        key = (max_tokens, *prompt)
        if key in self._answers:
            return self._answers[key]
        ids = torch.tensor([prompt], device=self.device)
        ends = sorted(end_token_ids) or None
        options = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": ends}
        tokens = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        self._answers[key] = tokens[:-1] if tokens and tokens[-1] in end_token_ids else tokens
        return self._answers[key]

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> np.ndarray:
        """float32 [len(token_ids), vocab_size]"""
        ids = torch.tensor([token_ids], device=self.device)
        found: np.ndarray = self._model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
        return found


def compare(kit: Kit, plain: PlainPath, options: dict[str, Any]) -> dict[str, Any]:
    """One engine's answers, greedy and sampled, drafts on and off."""
    # So few rows that prompts come in chunks, and that the sizes of steps are timed and captured quickly.
    defaults = {"cache_dir": str(kit.scratch / "cache"), "kv_cache_memory": 256 << 20, "max_num_batched_tokens": 96}
    engine = build(plain.folder, dtype=plain.dtype, max_num_seqs=8, **{**defaults, **options})
    vocab_size = engine.info.vocab_size
    jobs = random_jobs(
        random.Random(1), kit.pick(12, 3), vocab_size, longest=kit.pick(300, 60), max_tokens=kit.pick(48, 8)
    )
    found: dict[str, Any] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", TEMPERATURE)):
        mode = [_with_temperature(job, temperature, seed) for seed, job in enumerate(jobs)]
        covered = Coverage()
        speculated, plainly = run_jobs(engine, mode, covered), run_jobs(engine, mode, Coverage(), speculate=False)
        scores = [Scores(plain, mode, answers) for answers in (speculated, plainly)]
        found[name] = {
            "tokens": covered.tokens,
            "drafted": covered.drafted,
            "accepted": covered.accepted,
            "differ_from_off": _differences(speculated, {i: a.token_ids for i, a in plainly.items()}),
            "near_ties": [score.near_ties for score in scores],
            "near_ties_per_million": round(1e6 * scores[0].near_ties / max(1, scores[0].tokens)),
            "wrong": [score.wrong for score in scores],
        }
        if temperature == 0.0:
            ends = {i: a.sampling.end_token_ids for i, a in speculated.items() if a.sampling is not None}
            expected = {i: plain.greedy(job.prompt, job.params.max_tokens, ends[i]) for i, job in enumerate(mode)}
            found[name]["differ_from_generate"] = _differences(speculated, expected)
    found["is_right"] = not any(sum(map(len, found[name]["wrong"])) for name in ("greedy", "sampled"))
    return found


def _with_temperature(job: Job, temperature: float, seed: int) -> Job:

    params = dataclasses.replace(job.params, temperature=temperature, seed=seed)
    return dataclasses.replace(job, params=params)


def _differences(answers: dict[int, Answer], expected: dict[int, list[int]]) -> int:
    """How many answers are not the expected ones; why, the scores say."""
    return sum(first_difference(answers[i].token_ids, wanted) is not None for i, wanted in expected.items())


class Scores:
    """How each token of all answers stands in the plain path's logits."""

    def __init__(self, plain: PlainPath, jobs: list[Job], answers: dict[int, Answer]) -> None:
        self.tokens = self.near_ties = 0
        self.wrong: list[str] = []
        for i, job in enumerate(jobs):
            answer = answers[i]
            assert answer.sampling is not None
            text = job.prompt + answer.token_ids
            rows = plain.logits(text)[len(job.prompt) - 1 :]
            chosen = [frozenset([token]) for token in answer.token_ids]
            if answer.reason is FinishReason.STOP:  # by an end token, which is not part of the answer
                chosen.append(answer.sampling.end_token_ids)
            for place, tokens in enumerate(chosen):
                self._judge(plain.dtype, rows[place], tokens, len(job.prompt) + place, answer.sampling, f"{i}:{place}")

    def _judge(
        self,
        dtype: str,
        logits: np.ndarray,
        tokens: frozenset[int],
        position: int,
        sampling: ResolvedSampling,
        where: str,
    ) -> None:
        """One of `tokens` was chosen."""
        self.tokens += 1
        if any(is_near_tie(logits, token, position, sampling, 0.0) for token in tokens):  # it wins
            return
        bound = rounding_bound(dtype, logits)
        if any(is_near_tie(logits, token, position, sampling, bound) for token in tokens):
            self.near_ties += 1
        else:
            self.wrong.append(where)
