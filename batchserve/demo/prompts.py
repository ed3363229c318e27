"""Eight prompts of the kinds that the bundled model was trained on, in its training's exact phrasing.

The texts themselves were written for this page: none of them is in the training data.
"""

from __future__ import annotations

from typing import NamedTuple


class DemoPrompt(NamedTuple):
    """A title for people, and the user's message."""

    title: str
    message: str

    @property
    def text(self) -> str:
        """The message in the model's chat template; the tokenizer puts the BOS in front by itself."""
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
