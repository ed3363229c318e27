"""The grammar library's times: to load a vocabulary, and for masks, steps back and forced tokens of JSON answers.

python -m benchmarks.grammar_cost [--models bundled smollm2]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from benchmarks.common import spread, write_results
from benchmarks.structured import SCHEMAS

import numpy as np  # isort: skip

from batchserve.grammar.compiler import Vocabulary, compile_grammar
from batchserve.grammar.definition import Grammar
from batchserve.grammar.json_schema import checked_schema
from batchserve.runner.model_folder import resolve_model
from tools.real_model import default_folder

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWERS, MOST_TOKENS = 20, 200


def measure(folder: Path) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size, end = tokenizer.get_vocab_size(with_added_tokens=True), json.loads((folder / "config.json").read_text())
    vocabulary = Vocabulary(tokenizer.to_str(), size, (end["eos_token_id"],))
    times: dict[str, list[float]] = {"mask_us": [], "take_us": [], "back_us": [], "forced_us": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        found = call()
        times[name].append(1e6 * (time.perf_counter() - began_s))
        return found

    began_s = time.perf_counter()
    library = vocabulary.load()
    load_ms, rng = 1e3 * (time.perf_counter() - began_s), random.Random(0)
    for schema in SCHEMAS.values():
        start = compile_grammar(Grammar("json_schema", checked_schema(json.dumps(schema))), library)
        for _ in range(ANSWERS):
            matcher = start.deep_copy()
            for _ in range(MOST_TOKENS):
                mask = np.frombuffer(timed("mask_us", matcher.compute_bitmask), np.uint8)
                timed("forced_us", matcher.compute_ff_tokens)
                token = int(rng.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little"))))
                if matcher.is_stopped() or token == end["eos_token_id"]:
                    break
                timed("take_us", lambda: matcher.consume_token(token))  # noqa: B023 - called at once
                timed("back_us", lambda: matcher.rollback(1))  # noqa: B023
                matcher.consume_token(token)
    return {"tokens": size, "load_ms": load_ms, **{name: spread(each) for name, each in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("bundled", "smollm2"), default=["bundled"])
    args = parser.parse_args()
    found = {}
    for model in args.models:
        found[model] = measure(Path(default_folder() if model == "smollm2" else resolve_model(model)))
        print(model, found[model])
    print(f"written to {write_results('grammar_cost', found)}")


if __name__ == "__main__":
    main()
