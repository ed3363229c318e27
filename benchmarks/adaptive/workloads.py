"""What the programs of this package share: models, recorded answers, command line, results."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchserve.bench.records import load_records, split_warm
from batchserve.bench.replay import ReplayRecord
from batchserve.bench.tokenizer import MISTRAL_V1, load_encoder
from batchserve.config import DRAFTERS, EngineConfig
from batchserve.decoding_length.adaptive import AdaptiveDrafting
from batchserve.decoding_length.step_time import StepLoad, StepTimeModel, StepTimeTable
from batchserve.draft.base import Drafter, NullDrafter
from batchserve.draft.factory import create_drafter
from batchserve.draft.kernels import KernelLoader
from batchserve.errors import ConfigError
from batchserve.llm import LLM
from batchserve.native import pool
from batchserve.runner.model_folder import resolve_model
from batchserve.startup.build import BuiltEngine, build_engine
from batchserve.types import SamplingParams, SpeculationParams
from benchmarks.adaptive.driver import MAX_DRAFT_TOKENS, Contender, Driver
from benchmarks.adaptive.warm_drafter import WarmDrafter
from benchmarks.common import RESULTS, chat_prompts, find_sets, write_results
from tools.widen_model import MAX_POSITIONS, deepen_folder, random_model, save

WARM_SHARE = 0.6
MIN_RECORDS = 2  # to measure: one may warm up
VOCAB_SIZE = 32_000  # of the replay tokenizer
SHAPES = {"90m": "about 90M", "430m": "about 430M"}
DEEPENED = 21  # times the bundled model's layers: about 90M parameters
OWN_TEXT = "bundled"
OWN_ANSWERS, OWN_TOKENS = 120, 200
MAX_REQUESTS = 16
# A run is so long that speculation off takes about RUN_S, within these bounds on tokens of each request.
RUN_S, MIN_TOKENS, MAX_TOKENS = 0.7, 20, 64
PAIRS = 10


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. folder: of recorded sets, None where a program needs none; sets: which of them."""

    folder: Path | None
    is_quick: bool
    drafter: str
    out: str
    sets: tuple[str, ...] = ()

    @property
    def pairs(self) -> int:
        return 2 if self.is_quick else PAIRS

    @property
    def shapes(self) -> tuple[str, ...]:
        return ("90m",) if self.is_quick else tuple(SHAPES)

    def sizes(self, *sizes: int) -> tuple[int, ...]:
        return sizes[:2] if self.is_quick else sizes


def read_options(description: str | None, sets: tuple[str, ...] = (), *, has_drafter: bool = True) -> Options:
    """sets: those that are taken where nobody asks for others; where it is one, one is asked for. None: no folder.

    has_drafter: whether one is chosen; else it is "all".
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if sets:
        parser.add_argument("folder", type=Path, help="the recorded sets, one JSONL each")
        parser.add_argument("--sets", default=",".join(sets), help="which of the folder's (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    if has_drafter:
        parser.add_argument("--drafter", choices=DRAFTERS, default="mixture")
    parser.add_argument("--out", default="adaptive", help="folder in benchmarks/results/ (quick runs: adaptive_quick)")
    args = parser.parse_args()
    asked = tuple(dict.fromkeys(args.sets.split(","))) if sets else ()
    if len(sets) == 1 < len(asked):
        parser.error(f"argument --sets: {args.sets}: must be one set")
    out = "adaptive_quick" if args.quick and args.out == "adaptive" else args.out
    drafter = args.drafter if has_drafter else "all"
    return Options(getattr(args, "folder", None), args.quick, drafter, out, asked)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(options: Options, name: str, payload: dict[str, Any], started_s: float) -> None:
    """To benchmarks/results/; started_s is time.perf_counter() of the program's beginning."""
    (RESULTS / options.out).mkdir(parents=True, exist_ok=True)
    about = {"quick": options.is_quick, "drafter": options.drafter, "took_s": round(time.perf_counter() - started_s, 1)}
    say(str(write_results(f"{options.out}/{name}", {**about, **payload})))


@dataclass(frozen=True, slots=True)
class Workload:
    """Recorded answers: those that drafters have seen, and those that are measured."""

    name: str
    warm: Sequence[ReplayRecord]
    records: Sequence[ReplayRecord]

    def about(self) -> dict[str, Any]:
        answers = [len(record.response_token_ids) for record in self.records]
        prompts = [len(record.prompt_token_ids) for record in self.records]
        return {
            "warm_records": len(self.warm),
            "records": len(self.records),
            "mean_answer_tokens": round(sum(answers) / len(answers), 1),
            "mean_prompt_tokens": round(sum(prompts) / len(prompts), 1),
        }


def recorded(options: Options, name: str) -> Workload:
    """A set of the folder, but for empty prompts, answers of fewer than two tokens (there is nothing to draft), and
    records longer than the models' context. Raises ConfigError.
    """
    assert options.folder is not None
    path = find_sets(options.folder, [name])[name]
    records = load_records(path, load_encoder(MISTRAL_V1))
    warm, records = split_warm(records, WARM_SHARE) if len(records) > 1 else ([], records)
    answered = [record for record in records if record.prompt_token_ids and len(record.response_token_ids) > 1]
    measured = [each for each in answered if len(each.prompt_token_ids) + len(each.response_token_ids) <= MAX_POSITIONS]
    if len(measured) < MIN_RECORDS:
        raise ConfigError(
            f"{path}: behind the first {len(warm)} records, {len(measured)} have a prompt and an answer of two tokens, "
            f"and at most {MAX_POSITIONS} in all; must be at least {MIN_RECORDS}"
        )
    if num_long := len(answered) - len(measured):
        say(f"{path}: {num_long} of {len(answered)} records are left out: of more than {MAX_POSITIONS} tokens")
    return Workload(name, warm, measured)


def recorded_sets(options: Options) -> list[Workload]:
    """Those that are asked for. Raises ConfigError."""
    return [recorded(options, name) for name in options.sets]


def own_text(options: Options) -> Workload:
    """The bundled model's own answers to held-out prompts of its tasks, greedy."""
    say(f"{OWN_TEXT}: answers of the model itself")
    llm = LLM(max_num_seqs=MAX_REQUESTS, drafter="none")
    prompts = chat_prompts(30 if options.is_quick else OWN_ANSWERS, seed=11)
    params = SamplingParams(temperature=0.0, max_tokens=OWN_TOKENS)
    outputs = llm.generate(prompts, params, speculation=SpeculationParams(False), show_progress=False)
    records = [ReplayRecord(o.prompt_token_ids, o.token_ids, []) for o in outputs if len(o.token_ids) > 1]
    return Workload(OWN_TEXT, *split_warm(records, WARM_SHARE))


def new_drafter(name: str) -> Drafter:
    """A drafter whose kernels are compiled."""
    drafter = create_drafter(name, EngineConfig(decoding_length=MAX_DRAFT_TOKENS), 0)
    KernelLoader(in_background=False).prepare(type(drafter).__module__)
    return drafter


class Lab:
    """One model's engine, its measured step times, and a driver; drafters are changed by workload."""

    def __init__(self, engine: BuiltEngine) -> None:
        self.engine = engine
        assert isinstance(engine.core.drafts.policy, AdaptiveDrafting)
        self.table: StepTimeTable = engine.core.drafts.policy.step_time.table
        self.driver = Driver(engine.core, time.perf_counter)
        engine.core.executor.bind_thread()

    def use(self, drafter: Drafter, warm: Sequence[ReplayRecord] = ()) -> None:
        drafter.use_threads(pool.team(self.engine.core.executor.num_threads))
        self.engine.core.drafts.drafter = WarmDrafter(drafter, warm)

    def adaptive(self) -> Contender:
        """One that knows nothing but the table."""
        inflation = EngineConfig().draft_inflation
        return Contender("adaptive", MAX_DRAFT_TOKENS, AdaptiveDrafting(StepTimeModel(self.table), inflation))

    def tokens_each(self, size: int, workload: Workload, options: Options) -> int:
        """Of so many requests at once, for about RUN_S of plain decoding."""
        mean = sum(len(record.prompt_token_ids) for record in workload.records) // len(workload.records)
        step_s = StepTimeModel(self.table).predict(StepLoad(size, size, size, size * mean, size * mean))
        return 8 if options.is_quick else max(MIN_TOKENS, min(MAX_TOKENS, round(RUN_S / step_s)))

    def about(self) -> dict[str, Any]:
        model = StepTimeModel(self.table)
        return {
            "parameters": self.engine.core.executor.num_parameters,
            "dtype": self.engine.info.dtype,
            "threads": self.engine.core.executor.num_threads,
            "critical_length": model.critical_length(),
            "table": asdict(self.table),
        }


@contextmanager
def lab(model: str, **changes: Any) -> Iterator[Lab]:
    """An engine on a model made in a temporary folder: a shape's name, or the bundled model's deeper copy."""
    with tempfile.TemporaryDirectory() as folder:
        source = "bundled"
        if model != "bundled":
            source = str(Path(folder) / model)
            say(f"{model}: making the model")
            if model == "deepened":
                deepen_folder(Path(resolve_model("bundled")), Path(source), DEEPENED)
            else:
                save(random_model(model, VOCAB_SIZE), Path(source))
        # Measured here and now: what an earlier run has measured may have been another machine's moment.
        defaults = {"cache_dir": folder, "drafter": "none", "max_num_seqs": MAX_REQUESTS}
        config = EngineConfig(model=source, **{**defaults, **changes})  # type: ignore[arg-type]
        yield Lab(build_engine(config, say, drafter=NullDrafter(), clock=time.perf_counter))
