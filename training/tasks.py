"""Tasks whose answers overlap their prompts: extraction, quoting, editing, completion.

Each task function takes a corpus and a random generator and returns an `Example`. `kind` names the task;
`prompt` is the user's message, `answer` the reference answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .corpus import KEYWORDS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from .corpus import Corpus, Function

KEYS = (
    "name city status owner module version size color level path kind count email title code "
    "price region label source target author branch state weight height group team date".split()
)


@dataclass(frozen=True)
class Example:
    """One prompt with its reference answer."""

    kind: str
    prompt: str
    answer: str


def _value(corpus: Corpus, rng: random.Random) -> str | int:
    draw = rng.random()
    if draw < 0.3:
        return rng.randint(0, 9999)
    if draw < 0.4:
        return f"{rng.choice(corpus.words)}-{rng.randint(0, 999)}"
    return " ".join(rng.sample(corpus.words, rng.randint(1, 3)))


def _record(corpus: Corpus, rng: random.Random, low: int, high: int) -> dict[str, str | int]:
    return {key: _value(corpus, rng) for key in rng.sample(KEYS, rng.randint(low, high))}


def _lines(record: dict[str, str | int]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in record.items())


def record_to_json(corpus: Corpus, rng: random.Random) -> Example:
    record = _record(corpus, rng, 3, 8)
    prompt = f"Convert this record to JSON.\n{_lines(record)}"
    return Example("record_to_json", prompt, json.dumps(record, indent=2))


def records_to_json(corpus: Corpus, rng: random.Random) -> Example:
    keys = rng.sample(KEYS, rng.randint(2, 4))
    records = [{key: _value(corpus, rng) for key in keys} for _ in range(rng.randint(2, 3))]
    prompt = "Convert these records to a JSON list.\n" + "\n\n".join(_lines(r) for r in records)
    return Example("records_to_json", prompt, json.dumps(records, indent=2))


def json_to_record(corpus: Corpus, rng: random.Random) -> Example:
    record = _record(corpus, rng, 3, 7)
    prompt = f"Write this JSON as a record.\n{json.dumps(record, indent=2)}"
    return Example("json_to_record", prompt, _lines(record))


def field_question(corpus: Corpus, rng: random.Random) -> Example:
    record = _record(corpus, rng, 3, 8)
    key = rng.choice(list(record))
    prompt = f"Answer from the record.\n{_lines(record)}\nWhat is the {key}?"
    return Example("field_question", prompt, f"The {key} is {record[key]}.")


def document_question(corpus: Corpus, rng: random.Random) -> Example:
    documents = _distinct(rng.sample(corpus.documented, rng.randint(2, 5)))
    asked = rng.choice(documents)
    text = "\n".join(f"{f.name}: {f.summary}" for f in documents)
    prompt = f"Answer from the documents.\n{text}\nWhat does {asked.name} do?"
    answer = f'The documents say of {asked.name}: "{asked.summary}"'
    return Example("document_question", prompt, answer)


def _distinct(functions: list[Function]) -> list[Function]:
    return list({f.name: f for f in functions}.values())


def _identifiers(source: str) -> list[str]:
    return sorted(set(re.findall(r"\b[A-Za-z_]{2,14}\b", source)) - KEYWORDS)


def rename(corpus: Corpus, rng: random.Random) -> Example:
    function = rng.choice(corpus.editable)
    names = _identifiers(function.source) or [function.name]
    old = rng.choice(names) if rng.random() < 0.6 else function.name
    new = rng.choice(corpus.words)
    prompt = f"Rename {old} to {new} in this code.\n{function.source}"
    return Example("rename", prompt, re.sub(rf"\b{re.escape(old)}\b", new, function.source))


def add_docstring(corpus: Corpus, rng: random.Random) -> Example:
    function = rng.choice(corpus.editable)
    lines = function.source.split("\n")
    header = next((i for i, line in enumerate(lines) if line.rstrip().endswith(":")), 0)
    text = " ".join(rng.sample(corpus.words, rng.randint(2, 5)))
    edited = [*lines[: header + 1], f'    """{text}"""', *lines[header + 1 :]]
    prompt = f'Add the docstring "{text}" to this code.\n{function.source}'
    return Example("add_docstring", prompt, "\n".join(edited))


def delete_line(corpus: Corpus, rng: random.Random) -> Example:
    function = rng.choice(corpus.editable)
    lines = function.source.split("\n")
    at = rng.randrange(1, len(lines))
    prompt = f"Delete the line `{lines[at].strip()}` from this code.\n{function.source}"
    kept = [line for i, line in enumerate(lines) if i < 1 or line.strip() != lines[at].strip()]
    return Example("delete_line", prompt, "\n".join(kept))


def quote_line(corpus: Corpus, rng: random.Random) -> Example:
    function = rng.choice(corpus.editable)
    lines = [line.strip() for line in function.source.split("\n")]
    wanted = rng.choice([line for line in lines if len(line) > 6] or lines)
    words = re.findall(r"\w+", wanted)
    unique = [w for w in words if sum(w in re.findall(r"\w+", line) for line in lines) == 1]
    word = rng.choice(unique or words or [wanted])
    wanted = next(line for line in lines if word in line)
    prompt = f"Quote the first line with `{word}` from this code.\n{function.source}"
    return Example("quote_line", prompt, f"`{wanted}`")


def complete(corpus: Corpus, rng: random.Random) -> Example:
    """The last line of a function, made of words that the rest of it has."""
    source = rng.choice(corpus.completable).source
    cut = source.rindex("\n") + 1
    return Example("complete", f"Complete this code.\n{source[:cut]}", source[cut:])


TASKS: tuple[tuple[float, Callable[[Corpus, random.Random], Example]], ...] = (
    (0.23, record_to_json),
    (0.08, records_to_json),
    (0.08, json_to_record),
    (0.08, field_question),
    (0.24, document_question),
    (0.10, rename),
    (0.07, add_docstring),
    (0.04, delete_line),
    (0.05, quote_line),
    (0.03, complete),
)


def sample_example(corpus: Corpus, rng: random.Random, shares: dict[str, float] | None = None) -> Example:
    """One example of a random task, by the weights of TASKS; `shares` replaces those of the tasks that it names."""
    weights = [(shares or {}).get(task.__name__, weight) for weight, task in TASKS]
    task = rng.choices([task for _, task in TASKS], weights)[0]
    return task(corpus, rng)
