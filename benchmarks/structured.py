"""Tokens per second of JSON answers: without drafts, with drafts, with the tokens that schemas force, and with both.

    python -m benchmarks.structured [--models bundled smollm2] [--rounds 7] [--temperature 1.0]

16 answers, each by one of five schemas, one at a time and all at once. The answers are the same in all of these, and
every one that has ended is held against its schema. Nothing is shared between requests or rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.common import spread, write_results

import jsonschema_rs  # isort: skip

from batchserve.config import EngineConfig
from batchserve.draft.base import NullDrafter
from batchserve.engine.output_collector import OutputCollector
from batchserve.errors import BatchserveError
from batchserve.grammar.state import GrammarState
from batchserve.startup.build import build_engine
from batchserve.types import FinishReason, RequestOutput, SamplingParams, SpeculationParams
from tools.real_model import default_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchserve.engine.engine_core import Event
    from batchserve.startup.build import BuiltEngine

NUM_REQUESTS, MAX_TOKENS = 16, 250


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


TEXT, COUNT = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 9999}
DATE = {"type": "string", "format": "date"}
SCHEMAS = {
    "a person": record(
        first_name=TEXT, last_name=TEXT, date_of_birth=DATE, email_address=TEXT, is_subscribed={"type": "boolean"}
    ),
    "an invoice": record(
        invoice_number=COUNT,
        issued_on=DATE,
        currency={"enum": ["EUR", "USD", "JPY"]},
        line_items={
            "type": "array",
            "items": record(description=TEXT, quantity=COUNT, unit_price=COUNT),
            "minItems": 1,
            "maxItems": 3,
        },
    ),
    "a call of a tool": record(
        tool_name={"enum": ["get_current_weather", "search_documents", "send_message"]},
        arguments=record(query=TEXT, max_results=COUNT, language={"enum": ["english", "german", "french"]}),
    ),
    "a review": record(
        sentiment={"enum": ["positive", "neutral", "negative"]},
        confidence={"type": "number", "minimum": 0, "maximum": 1},
        summary={"type": "string", "maxLength": 120},
    ),
    "a place": record(name=TEXT, country=TEXT, coordinates=record(latitude=COUNT, longitude=COUNT), population=COUNT),
}
MODES = ("off", "drafts", "forced", "drafts and forced")


@contextmanager
def nothing_forced(is_wanted: bool) -> Iterator[None]:
    """Grammars force no tokens meanwhile, though masks stay what they are."""
    right = GrammarState._forced_here
    if is_wanted:
        GrammarState._forced_here = lambda self: []  # type: ignore[method-assign]
    try:
        yield
    finally:
        GrammarState._forced_here = right  # type: ignore[method-assign]


def answers(
    engine: BuiltEngine, temperature: float, num_at_once: int, *, speculate: bool
) -> tuple[list[RequestOutput], float]:
    """Returns the answers, and the seconds that they took."""
    core = engine.core
    speculation = SpeculationParams(is_enabled=speculate, draft_scope="request")
    collectors: dict[str, OutputCollector] = {}

    def collect(events: list[Event]) -> None:
        for request, event in events:
            if isinstance(event, BatchserveError):
                raise event
            collectors[request.request_id].add(event)

    core.emit = collect
    asked = []
    for i in range(NUM_REQUESTS):
        name = [*SCHEMAS][i % len(SCHEMAS)]
        prompt = engine.processor.tokenize(f"Here is {name} as JSON, example {i + 1}:\n")
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=MAX_TOKENS, json_schema=SCHEMAS[name])
        asked.append(engine.begin(engine.processor.new_request(str(i), prompt, params, speculation, 0.0)))
        collectors[str(i)] = OutputCollector(prompt)
    began_s = time.perf_counter()
    for start in range(0, NUM_REQUESTS, num_at_once):
        for request in asked[start : start + num_at_once]:
            core.add(request)
        while core.has_work:
            core.step()
    seconds = time.perf_counter() - began_s
    return [collectors[str(i)].output() for i in range(NUM_REQUESTS)], seconds


def check(outputs: list[RequestOutput]) -> int:
    """Returns how many answers have ended; all of these are valid."""
    ended = 0
    for i, output in enumerate(outputs):
        if output.finish_reason is FinishReason.STOP:
            ended += 1
            schema = [*SCHEMAS.values()][i % len(SCHEMAS)]
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(output.text))
    return ended


def measure(model: str, rounds: int, temperature: float, num_at_once: int) -> dict[str, Any]:
    """Returns tokens per second by mode, and their ratios to those without drafts."""
    config = EngineConfig(model, drafter="mixture", max_model_len=512)
    engines = {name: build_engine(config, drafter=drafter) for name, drafter in (("", None), ("forced", NullDrafter()))}
    rng, speeds = random.Random(0), {mode: [] for mode in MODES}  # type: ignore[var-annotated]
    truth: list[list[int]] = []
    for i in range(rounds + 1):
        for mode in rng.sample(MODES, len(MODES)):
            engine = engines["forced" if mode == "forced" else ""]
            engine.core.executor.bind_thread()
            with nothing_forced(mode in ("off", "drafts")):
                outputs, seconds = answers(engine, temperature, num_at_once, speculate=mode != "off")
            token_ids = [each.token_ids for each in outputs]
            truth = truth or token_ids
            if token_ids != truth:
                raise RuntimeError(f"{mode}: other tokens than in the first round")
            ended = check(outputs)
            if i:  # in the first round kernels are loaded, and step times learned
                speeds[mode].append(sum(map(len, token_ids)) / seconds)
    found: dict[str, Any] = {
        "tokens": sum(map(len, truth)),
        "ended": ended,
        "tokens_per_second": {mode: spread(each) for mode, each in speeds.items()},
    }
    pairs = {mode: [a / b for a, b in zip(speeds[mode], speeds["off"], strict=True)] for mode in MODES[1:]}
    found["over_off"] = {mode: spread(each) for mode, each in pairs.items()}
    found["forced_over_drafts"] = spread(
        [a / b for a, b in zip(speeds["drafts and forced"], speeds["drafts"], strict=True)]
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("bundled", "smollm2"), default=["bundled"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--name", default="structured", help="of the file of results")
    args = parser.parse_args()
    found: dict[str, Any] = {"temperature": args.temperature}
    for model in args.models:
        folder = str(default_folder()) if model == "smollm2" else model
        for num_at_once in (1, NUM_REQUESTS):
            cell = found[f"{model}, {num_at_once} at once"] = measure(
                folder, args.rounds, args.temperature, num_at_once
            )
            print(model, num_at_once, json.dumps(cell), flush=True)
    print(f"written to {write_results(args.name, found)}")


if __name__ == "__main__":
    main()
