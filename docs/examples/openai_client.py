"""The OpenAI client against a running server: `batchserve serve --model bundled`, then

pip install openai
python docs/examples/openai_client.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import sys

from openai import BadRequestError, OpenAI
from pydantic import BaseModel

RECORD = "Convert this record to JSON.\nname: socket reader\ncount: 7012"


class Record(BaseModel, extra="forbid"):
    """What the answer has to be."""

    name: str
    count: int


def main(url: str, key: str = "none") -> None:
    client = OpenAI(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": RECORD}]

    answer = ""
    for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=60, stream=True):
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="")
        answer += piece
    print()

    parsed = client.chat.completions.parse(model=model, messages=messages, response_format=Record, max_tokens=60)
    print("parsed:", repr(parsed.choices[0].message.parsed))

    # What the answer will have much in common with makes it faster, and changes no token of it.
    again = client.chat.completions.create(
        model=model, messages=messages, max_tokens=60, prediction={"type": "content", "content": answer}
    )
    assert again.usage is not None
    details = again.usage.completion_tokens_details
    assert details is not None
    print(f"{details.accepted_prediction_tokens} tokens of the prediction are in the answer")
    assert again.choices[0].message.content == answer

    try:
        client.chat.completions.create(model=model, messages=messages, top_p=1.5)
    except BadRequestError as error:
        print(f"{error.param}: {error.code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
