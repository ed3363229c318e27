"""The demo's prompts: eight tasks phrased exactly as in the bundled model's training, and eight chat questions.

The chat questions are for other models. The texts were written for this file. None of them is in the training data.
"""

from __future__ import annotations

from typing import NamedTuple

BUNDLED = "bundled"


class DemoPrompt(NamedTuple):
    """A title to show and the user's message."""

    title: str
    message: str

    @property
    def text(self) -> str:
        """The message in the bundled model's chat template. The tokenizer itself adds the BOS token."""
        return f"<|user|>{self.message}<|assistant|>"


PROMPTS = (
    DemoPrompt(
        "record to JSON",
        """\
Convert this record to JSON.
name: socket reader
city: handler-417
status: closed
owner: thread manager
version: 3108
path: default buffer
count: 52
region: header field""",
    ),
    DemoPrompt(
        "records to JSON",
        """\
Convert these records to a JSON list.
title: parse option
price: 1290
team: signal group

title: stream writer
price: 846
team: context""",
    ),
    DemoPrompt(
        "question about documents",
        """\
Answer from the documents.
open_cache: Open the cache file and return its entries as a dictionary.
flush_queue: Write every pending message of the queue to the given stream.
split_header: Split a header line into its name and a list of parameters.
close_session: Close the session and release the connection that it holds.
What does flush_queue do?""",
    ),
    DemoPrompt(
        "question about documents",
        """\
Answer from the documents.
read_block: Return the next block of the file, or an empty string at the end.
is_absolute: Test whether the path starts at the root of the file system.
join_lines: Join a list of lines into one string with the given separator.
What does is_absolute do?""",
    ),
    DemoPrompt(
        "code edit: rename",
        """\
Rename value to entry in this code.
def add_value(self, key, value):
    if key in self.values:
        raise KeyError(key)
    if value is None:
        value = self.default
    self.values[key] = value
    self.order.append(key)
    return value""",
    ),
    DemoPrompt(
        "code edit: docstring",
        """\
Add the docstring "return first matching handler" to this code.
def find_handler(self, name):
    for handler in self.handlers:
        if handler.name == name:
            return handler
    return self.default_handler""",
    ),
    DemoPrompt(
        "code edit: delete a line",
        """\
Delete the line `self.count += 1` from this code.
def write(self, data):
    if self.closed:
        raise ValueError("write to closed file")
    self.count += 1
    self.buffer.append(data)
    return len(data)""",
    ),
    DemoPrompt(
        "completion",
        """\
Complete this code.
def __repr__(self):
    args = []
    if self.name is not None:
        args.append('name=%r' % self.name)
    if self.path is not None:
""",
    ),
)

CHAT_PROMPTS = (
    DemoPrompt("explain", "Why does the moon seem to change its shape during a month?"),
    DemoPrompt("write", "Write a short story about a lighthouse keeper who finds a letter in a bottle."),
    DemoPrompt("arithmetic", "A shop sells pens at 3 for 2 dollars. What do 12 pens cost? Show each step."),
    DemoPrompt("code", "Write a Python function that counts how often each word occurs in a text."),
    DemoPrompt(
        "extract",
        "List the names and the years in this text as JSON: Ada wrote the first program in 1843, and Grace built the "
        "first compiler in 1952.",
    ),
    DemoPrompt("plan", "Make a plan for a day in a city that I do not know, as a numbered list."),
    DemoPrompt("compare", "Compare trains and aeroplanes for a journey of 500 kilometres, as a table."),
    DemoPrompt(
        "rewrite",
        "Rewrite this more politely: Send me the report today. You were late twice, and I need it for a meeting.",
    ),
)


class Questions(NamedTuple):
    """Prompts for a model, as texts or token ids, and their titles."""

    model: str
    titles: tuple[str, ...]
    prompts: tuple[str | list[int], ...]

    @property
    def described(self) -> str:
        return "the bundled model" if self.model == BUNDLED else f"the model {self.model}"


def questions_for(model: str) -> Questions:
    """Returns the bundled model's tasks, or chat questions in another model's chat template. Raises ConfigError."""
    if model == BUNDLED:
        return Questions(model, tuple(each.title for each in PROMPTS), tuple(each.text for each in PROMPTS))
    from batchserve.config import EngineConfig
    from batchserve.runner.chat import chat_token_ids
    from batchserve.runner.model_folder import resolve_model
    from batchserve.runner.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(model), EngineConfig(model=model))
    asked = [chat_token_ids(each.message, tokenizer, model) for each in CHAT_PROMPTS]
    return Questions(model, tuple(each.title for each in CHAT_PROMPTS), tuple(asked))
