"""Measure the bundled model's gates: `python -m training.evaluate --model DIR --out gates.json`.

Greedy answers to held-out prompts of the training mix. No function of the standard library that a prompt is made of was
seen in training, and the seed is none of training's. Exits non-zero when a gate is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

# Before torch loads: threads that spin while they wait are many times slower beside any other busy process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .corpus import build_corpora, read_sources
from .tasks import Example, sample_example

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED = 20_261_122  # training draws from 0 and from 10,000 up
MAX_NEW_TOKENS = 256
LOOP_MAX_NGRAM, LOOP_REPEATS = 8, 5
LOOKUP_MAX_NGRAM, LOOKUP_COPY = 3, 10
JSON_KINDS = ("record_to_json", "records_to_json")
QUOTE_KINDS = ("document_question",)


@dataclass(frozen=True)
class Answer:
    """One prompt, its reference answer and what the model made of it.

    `token_ids` is what was generated, without the EOS; `has_eos` tells whether the EOS came within MAX_NEW_TOKENS.
    """

    example: Example
    prompt_ids: list[int]
    reference_ids: list[int]
    token_ids: list[int]
    text: str
    has_eos: bool

    @property
    def is_exact(self) -> bool:
        return self.has_eos and self.text == self.example.answer


@dataclass(frozen=True)
class Gate:
    """A measured value and the closed interval that it must lie in."""

    value: float
    low: float
    high: float
    meaning: str

    @property
    def is_passed(self) -> bool:
        return self.low <= self.value <= self.high


def sample_prompts(num_prompts: int, seed: int = SEED) -> list[Example]:
    """Held-out examples by the weights of the training mix; the same for the same interpreter and seed."""
    _, held_out = build_corpora(read_sources())
    rng = random.Random(seed)
    return [sample_example(held_out, rng) for _ in range(num_prompts)]


def prompt_ids_of(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The chat template's token ids up to where the answer begins."""
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def generate_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], batch_size: int
) -> list[Answer]:
    """Greedy answers, in the order of `examples`; batches are made of prompts of like length, padded on the left."""
    prompts = [prompt_ids_of(tokenizer, example.prompt) for example in examples]
    order = sorted(range(len(examples)), key=lambda i: len(prompts[i]))
    generated: dict[int, list[int]] = {}
    start = time.perf_counter()
    for at in range(0, len(order), batch_size):
        indices = order[at : at + batch_size]
        rows = _generate_batch(model, [prompts[i] for i in indices])
        generated.update(zip(indices, rows, strict=True))
        print(f"  {len(generated)} of {len(examples)} answers, {time.perf_counter() - start:.0f} s", flush=True)
    eos = model.generation_config.eos_token_id
    answers = []
    for i, example in enumerate(examples):
        ids = generated[i]
        has_eos = eos in ids
        ids = ids[: ids.index(eos)] if has_eos else ids
        text = tokenizer.decode(ids, skip_special_tokens=True)
        reference = list(tokenizer(example.answer, add_special_tokens=False)["input_ids"])
        answers.append(Answer(example, prompts[i], reference, ids, text, has_eos))
    return answers


def _generate_batch(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Generated ids of each prompt; what follows the first EOS is padding."""
    width = max(len(prompt) for prompt in prompts)
    eos = model.generation_config.eos_token_id
    ids = torch.full((len(prompts), width), eos)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=eos
        )
    return [[int(token) for token in row] for row in out[:, width:]]


def loops_of(token_ids: Sequence[int]) -> set[tuple[int, ...]]:
    """Every n-gram of up to LOOP_MAX_NGRAM tokens that comes LOOP_REPEATS times in a row, in all its rotations."""
    found = set()
    for n in range(1, LOOP_MAX_NGRAM + 1):
        run = 0  # tokens in a row that equal the one n before
        for i in range(n, len(token_ids)):
            run = run + 1 if token_ids[i] == token_ids[i - n] else 0
            if run >= n * (LOOP_REPEATS - 1):
                found.add(tuple(token_ids[i - n + 1 : i + 1]))
    return found


def has_own_loop(answer: Answer) -> bool:
    """The output loops where the reference answer does not."""
    return bool(loops_of(answer.token_ids) - loops_of(answer.reference_ids))


def lookup_draft(context: Sequence[int]) -> list[int]:
    """Plain prompt lookup: what followed the first earlier occurrence of the longest suffix of up to 3 tokens."""
    for n in range(min(LOOKUP_MAX_NGRAM, len(context) - 1), 0, -1):
        suffix = list(context[-n:])
        for i in range(len(context) - n):
            if context[i : i + n] == suffix:
                return list(context[i + n : i + n + LOOKUP_COPY])
    return []


def lookup_steps(prompt_ids: list[int], output_ids: list[int]) -> int:
    """Steps that prompt lookup needs to emit `output_ids`; the first comes with the prompt and has no draft."""
    done, steps = 1, 1
    while done < len(output_ids):
        draft = lookup_draft(prompt_ids + output_ids[:done])
        accepted = 0
        for drafted, token in zip(draft, output_ids[done:], strict=False):
            if drafted != token:
                break
            accepted += 1
        done += accepted + 1
        steps += 1
    return steps


def acceptance_length(answers: Sequence[Answer], eos: int) -> float:
    """Tokens emitted a step under plain prompt lookup, over all answers; the EOS is a token."""
    outputs = [answer.token_ids + [eos] * answer.has_eos for answer in answers]
    steps = sum(lookup_steps(answer.prompt_ids, output) for answer, output in zip(answers, outputs, strict=True))
    return sum(map(len, outputs)) / steps


def gates_of(answers: Sequence[Answer], eos: int) -> dict[str, Gate]:
    """The gates of the model card, by name."""

    def exact(kinds: tuple[str, ...]) -> float:
        chosen = [answer.is_exact for answer in answers if answer.example.kind in kinds]
        return sum(chosen) / len(chosen) if chosen else float("nan")

    count = len(answers)
    below_one_percent = (max(1, -(-count // 100)) - 1) / count  # the largest share of `count` that is under 1%
    return {
        "ends_with_eos": Gate(sum(a.has_eos for a in answers) / count, 0.95, 1.0, "end with EOS before 256 tokens"),
        "loops": Gate(sum(map(has_own_loop, answers)) / count, 0.0, below_one_percent, "contain a loop of their own"),
        "json_exact": Gate(exact(JSON_KINDS), 0.9, 1.0, "JSON tasks answered exactly"),
        "quotes_exact": Gate(exact(QUOTE_KINDS), 0.9, 1.0, "quoted answers exact"),
        "lookup_acceptance_length": Gate(
            acceptance_length(answers, eos), 1.3, 8.0, "acceptance length of plain prompt lookup"
        ),
    }


def kinds_of(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Per kind of task: how many prompts; the shares answered exactly, ended and looping; the mean number of tokens."""
    groups: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.example.kind].append(answer)
    return {
        kind: {
            "prompts": len(group),
            "exact": sum(a.is_exact for a in group) / len(group),
            "ends_with_eos": sum(a.has_eos for a in group) / len(group),
            "loops": sum(map(has_own_loop, group)) / len(group),
            "mean_tokens": sum(len(a.token_ids) for a in group) / len(group),
        }
        for kind, group in sorted(groups.items())
    }


def samples_of(answers: Sequence[Answer], per_kind: int = 1) -> list[dict[str, object]]:
    """The first `per_kind` prompts of every kind with their answers: not chosen by how good they are."""
    taken: Counter[str] = Counter()
    samples: list[dict[str, object]] = []
    for answer in sorted(answers, key=lambda a: a.example.kind):
        kind = answer.example.kind
        if taken[kind] < per_kind:
            taken[kind] += 1
            samples.append({**asdict(answer.example), "output": answer.text, "is_exact": answer.is_exact})
    return samples


def report_of(model: PreTrainedModel, answers: Sequence[Answer], seed: int) -> dict[str, object]:
    """Everything measured, as plain data for JSON."""
    gates = gates_of(answers, model.generation_config.eos_token_id)
    too_long = sum(len(a.reference_ids) >= MAX_NEW_TOKENS for a in answers)
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_prompts": len(answers),
        "seed": seed,
        "dtype": str(model.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "max_new_tokens": MAX_NEW_TOKENS,
        "references_without_room_for_eos": too_long,
        "exact": sum(a.is_exact for a in answers) / len(answers),
        "gates": {name: {**asdict(gate), "is_passed": gate.is_passed} for name, gate in gates.items()},
        "kinds": kinds_of(answers),
        "samples": samples_of(answers),
    }


def print_report(answers: Sequence[Answer], gates: dict[str, Gate]) -> None:
    console = Console()
    table = Table(title=f"Gates on {len(answers)} held-out prompts")
    for name in ("gate", "value", "bound", "passed"):
        table.add_column(name)
    for gate in gates.values():
        bound = f"{gate.low:g} to {gate.high:g}"
        table.add_row(gate.meaning, f"{gate.value:.3f}", bound, "yes" if gate.is_passed else "NO")
    console.print(table)
    table = Table(title="By kind of task")
    for name in ("kind", "prompts", "exact", "ends with EOS", "loops", "mean tokens"):
        table.add_column(name)
    for kind, row in kinds_of(answers).items():
        shares = [f"{row[name]:.2f}" for name in ("exact", "ends_with_eos", "loops")]
        table.add_row(kind, f"{row['prompts']:.0f}", *shares, f"{row['mean_tokens']:.0f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="where to write the measurements as JSON")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    answers = generate_answers(model, tokenizer, sample_prompts(args.prompts, args.seed), args.batch_size)
    gates = gates_of(answers, model.generation_config.eos_token_id)
    print_report(answers, gates)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report_of(model, answers, args.seed), indent=2) + "\n")
    return 0 if all(gate.is_passed for gate in gates.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
