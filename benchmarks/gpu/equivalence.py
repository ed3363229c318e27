"""(b) Answers on the device: speculation on against off, both against transformers, near-ties counted.

Every token of every answer is also re-scored by transformers, given the tokens before it: it wins, or loses by less
than the rounding bound of batchserve.sampling.near_tie, or than what rounding did to transformers' own logits of that
row, which in 16 bits may be more. A token that does neither is an error.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from batchserve.request import ResolvedSampling
from batchserve.runner.model_folder import resolve_model
from batchserve.sampling.near_tie import MASKED, is_near_tie, rounding_bound
from batchserve.types import FinishReason, SamplingParams, SpeculationParams
from benchmarks.gpu.kit import Kit, Report
from benchmarks.gpu.models import all_backends, check_graphs, graph_modes, num_graphs
from benchmarks.gpu.modules import is_ready, stock, variant
from benchmarks.gpu.verdict import KERNELS
from tests.equivalence.harness import Answer, Coverage, Job, build, first_difference, random_jobs
from tests.equivalence.harness import run as run_jobs
from tests.tiny_models import save_tiny_model

BUNDLED = "bundled"
TINY = ("llama", "gemma2", "qwen3", "mistral", "phi3", "gpt2", "deepseek_v3", "gpt_oss")
WIDE = {"llama", "gemma2", "qwen3", "mistral", "phi3"}  # those that can be given a head_dim that FlashInfer has
# torch multiplies experts without waiting for the device in bf16 only: in other dtypes their steps cannot be captured.
EXPERTS = {"deepseek_v3", "gpt_oss"}
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
FRONT_NEEDS = {"gemma2": variant(HEAD_DIM, torch.bfloat16, has_softcap=True, rows_first=True)}
TEMPERATURE = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How an engine is built, the longest of its prompts, and whether a wrong token is its fault."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    longest: int = 300
    is_judged: bool = True


# Windows whose rows are not verified; so little K/V that requests are preempted; contexts that kernels split.
WAYS = {
    "/long contexts": Way(longest=1800),
    "/little K/V": Way({"max_model_len": 400, "kv_cache_memory": 1000 * 3072}),
    "/jacobi": Way({"drafter": "jacobi"}),
}


def run(kit: Kit, report: Report) -> None:
    # bfloat16 first: FlashInfer has no other, and its graphs are what has to be right before anything is timed.
    dtypes = kit.pick((torch.bfloat16, torch.float32), (torch.float32,))
    modes = {f"/{mode}": Way(options) for mode, options in graph_modes(kit).items() if mode in ("eager", "whole")}
    # As engines run on a GPU; all others are not compiled, which takes longer than what is compared.
    compiled = (
        {} if kit.is_dry or kit.is_eager else {"/layers": Way({"compile_model": "layers", "custom_kernels": True})}
    )
    report.about(
        compiles=[f"{BUNDLED}/bfloat16/{backend}{way}" for backend in KERNELS for way in (*compiled, "/whole")]
    )
    _compare_all(kit, report, BUNDLED, dtypes[0], {"": Way()})
    _compare_all(kit, report, BUNDLED, dtypes[0], compiled, max_backends=1)
    for dtype in dtypes[1:]:
        _compare_all(kit, report, BUNDLED, dtype, {"": Way()})
    _compare_all(kit, report, BUNDLED, dtypes[0], WAYS)
    for model in kit.pick(TINY, TINY[:1]):
        for dtype in dtypes:
            # Rounded otherwise a row may be given to other experts, which no bound on rounding covers.
            is_judged = model not in EXPERTS or dtype == torch.float32
            _compare_all(kit, report, model, dtype, {"": Way(is_judged=is_judged)})
    _compare_all(kit, report, BUNDLED, dtypes[0], modes)


def _compare_all(
    kit: Kit,
    report: Report,
    model: str,
    dtype: torch.dtype,
    ways: Mapping[str, Way],
    max_backends: int | None = None,
) -> None:
    """Every backend that can serve the model, or the first of them, in each of these ways."""
    place = f"{model}/{str(dtype).removeprefix('torch.')}"
    cells: dict[str, Way] = {}
    for name, way in ways.items():
        for backend, options in [*backends(kit, model, dtype).items()][:max_backends]:
            cells[f"{place}/{backend}{name}"] = dataclasses.replace(way, options={**options, **way.options})
            report.on(backend, f"{place}/{backend}{name}")
    if not report.wants(*cells):
        return
    plain = report.build(place, partial(PlainPath, kit, model, dtype))
    if plain is not None:
        for name, way in cells.items():
            report.cell(name, partial(compare, kit, plain, way))
            kit.free()


def backends(kit: Kit, model: str, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Those that can serve the model; torch and triton for fp32, which FlashInfer has not."""
    found = all_backends(kit, HEAD_DIM, dtype)
    if model not in (BUNDLED, *WIDE) or not all(is_ready(kit, module) for module in NEEDS.get(model, ())):
        found = {name: options for name, options in found.items() if not name.startswith("flashinfer")}
    if model in FRONT_NEEDS and not is_ready(kit, FRONT_NEEDS[model]):
        found.pop("flashinfer_front", None)
    if model in EXPERTS and dtype != torch.bfloat16:
        found = {name: {**options, "enforce_eager": True} for name, options in found.items()}
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
    if model == "phi3":  # its head_dim follows from these; wider, its random weights would round far too much in bf16
        return {"hidden_size": HEAD_DIM, "num_attention_heads": 1, "num_key_value_heads": 1}
    return {"head_dim": HEAD_DIM}


class PlainPath:
    """transformers itself on the device, one request at a time: the truth."""

    def __init__(self, kit: Kit, name: str, dtype: torch.dtype) -> None:
        self.folder, self.device = folder_of(kit, name), kit.device
        self.dtype = str(dtype).removeprefix("torch.")
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, attn_implementation="eager")
        self._model = model.eval().to(self.device)
        self._exact = None if dtype == torch.float32 else copy.deepcopy(self._model).float()  # of the same weights
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
    def logits(self, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """float32 [len(token_ids), vocab_size]; and of each row how much of a gap of two logits rounding may close."""
        ids = torch.tensor([token_ids], device=self.device)

        def of(model: Any) -> np.ndarray:
            found: np.ndarray = model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
            return found

        logits = of(self._model)
        if self._exact is None:
            return logits, np.zeros(len(logits))
        is_open = logits >= logits.max(axis=1, keepdims=True) - MASKED
        rounded = np.abs(np.subtract(logits, of(self._exact), where=is_open, out=np.zeros_like(logits)))
        return logits, 2.0 * rounded.max(axis=1)


def compare(kit: Kit, plain: PlainPath, way: Way) -> dict[str, Any]:
    """One engine's answers, greedy and sampled, drafts on and off."""
    # So few rows that prompts come in chunks, and that the sizes of steps are timed and captured quickly.
    defaults = {"cache_dir": str(kit.scratch / "cache"), "kv_cache_memory": 256 << 20, "max_num_batched_tokens": 96}
    defaults |= {"compile_model": "off", "custom_kernels": False}
    engine = build(plain.folder, dtype=plain.dtype, max_num_seqs=8, **{**defaults, **way.options})
    jobs = _jobs(kit, engine.info.vocab_size, kit.pick(way.longest, 60))
    check_graphs(engine, bool(way.options.get("enforce_eager")))
    found: dict[str, Any] = {"graphs": num_graphs(engine)}
    for name, temperature in (("greedy", 0.0), ("sampled", TEMPERATURE)):
        mode = [_with_temperature(job, temperature, seed) for seed, job in enumerate(jobs)]
        covered = Coverage()
        kit.beat()
        speculated = run_jobs(engine, mode, covered)
        kit.beat()
        plainly = run_jobs(engine, mode, Coverage(), speculate=False)
        kit.beat()
        scores = [Scores(plain, mode, answers) for answers in (speculated, plainly)]
        kit.beat()
        found[name] = {
            "tokens": covered.tokens,
            "drafted": covered.drafted,
            "accepted": covered.accepted,
            "cached_tokens": sum(a.usage.cached_tokens for a in speculated.values() if a.usage is not None),
            "left": sum(a.reason is None for a in speculated.values()),
            "differ_from_off": _differences(speculated, plainly),
            "near_ties": [score.near_ties for score in scores],
            "near_ties_per_million": round(1e6 * scores[0].near_ties / max(1, scores[0].tokens)),
            "near_ties_of_loud_rows": [score.loud for score in scores],
            "wrong": [score.wrong for score in scores],
        }
        if temperature == 0.0:
            ends = {i: a.sampling.end_token_ids for i, a in speculated.items() if a.sampling is not None}
            texts = [plain.greedy(job.prompt, job.params.max_tokens, ends[i]) for i, job in enumerate(mode)]
            expected = {i: Answer(text, FinishReason.LENGTH) for i, text in enumerate(texts)}
            found[name]["differ_from_generate"] = _differences(speculated, expected)
    is_wrong = any(sum(map(len, found[name]["wrong"])) for name in ("greedy", "sampled"))
    found |= {"is_judged": way.is_judged, "is_right": not (way.is_judged and is_wrong)}
    return found


def _jobs(kit: Kit, vocab_size: int, longest: int) -> list[Job]:
    """Prompts of all lengths, one request in three aborted; some come later and begin as an ended one did."""
    rng, most_tokens, ended_after = random.Random(1), kit.pick(48, 8), 80 + longest // 4
    jobs = random_jobs(rng, kit.pick(12, 3), vocab_size, longest=longest, max_tokens=most_tokens)
    for job in jobs[2::3]:
        job.leave = job.arrival + 4
    known = [rng.randrange(3, vocab_size) for _ in range(longest)]
    params = SamplingParams(temperature=0.0, max_tokens=most_tokens)
    for number, size in enumerate((longest, longest, longest // 2, longest - 7)[: kit.pick(4, 2)]):
        tail = [rng.randrange(3, vocab_size) for _ in range(number)]
        jobs.append(Job(known[:size] + tail, params, arrival=number * ended_after))
    return [dataclasses.replace(job, speculation=SpeculationParams(draft_scope="team")) for job in jobs]


def _with_temperature(job: Job, temperature: float, seed: int) -> Job:
    params = dataclasses.replace(job.params, temperature=temperature, seed=seed)
    return dataclasses.replace(job, params=params)


def _differences(answers: dict[int, Answer], expected: dict[int, Answer]) -> int:
    """How many answers are not the expected ones; why, the scores say. Of what was aborted the beginnings count."""
    return sum(_differs(answers[i], wanted) for i, wanted in expected.items())


def _differs(answer: Answer, wanted: Answer) -> bool:
    one, other = answer.token_ids, wanted.token_ids
    if answer.reason is None or wanted.reason is None:
        size = min(len(one), len(other))
        one, other = one[:size], other[:size]
    return first_difference(one, other) is not None


class Scores:
    """How each token of all answers stands in the plain path's logits. loud: near-ties beyond the stated bound, in rows
    of which the plain path itself was rounded by more.
    """

    def __init__(self, plain: PlainPath, jobs: list[Job], answers: dict[int, Answer]) -> None:
        self.tokens = self.near_ties = self.loud = 0
        self.wrong: list[str] = []
        for i, job in enumerate(jobs):
            answer = answers[i]
            assert answer.sampling is not None
            text = job.prompt + answer.token_ids
            rows, rounding = (each[len(job.prompt) - 1 :] for each in plain.logits(text))
            chosen = [frozenset([token]) for token in answer.token_ids]
            if answer.reason is FinishReason.STOP:  # by an end token, which is not part of the answer
                chosen.append(answer.sampling.end_token_ids)
            for place, tokens in enumerate(chosen):
                loses_by = partial(_loses_by, rows[place], tokens, len(job.prompt) + place, answer.sampling)
                self._judge(loses_by, rounding_bound(plain.dtype, rows[place]), rounding[place], f"{i}:{place}")

    def _judge(self, loses_by: Callable[[float], bool], bound: float, rounding: float, where: str) -> None:
        self.tokens += 1
        if loses_by(0.0):  # it wins
            return
        if not loses_by(max(bound, rounding)):
            self.wrong.append(where)
            return
        self.near_ties += 1
        self.loud += not loses_by(bound)


def _loses_by(
    logits: np.ndarray, tokens: frozenset[int], position: int, sampling: ResolvedSampling, bound: float
) -> bool:
    """Whether one of `tokens`, of which one was chosen, wins or loses by at most so much."""
    return any(is_near_tie(logits, token, position, sampling, bound) for token in tokens)
