"""The engine inside another asyncio program: two answers at once, as they are made.

python docs/examples/async_engine.py
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from batchserve import AsyncEngine, BatchserveError, Delta, DraftConfig, EngineConfig, SamplingParams

RECORD = '{{\n  "name": "{}",\n  "status": "closed",\n  "owner": "thread manager",\n  "path": "default buffer"\n}}'
NAMES = "socket reader", "stream writer"


async def answer(engine: AsyncEngine, name: str) -> str:
    prompt = f"<|user|>Write this JSON as a record.\n{RECORD.format(name)}<|assistant|>"
    params, text = SamplingParams(temperature=0.0, max_tokens=100), ""
    # Leaving the block ends the request, whenever that is.
    async with aclosing(engine.stream(prompt, params, deadline_s=60.0)) as events:
        async for event in events:  # one Started, then Deltas
            if isinstance(event, Delta):
                text += event.text
                if event.usage is not None:
                    print(f"{event.usage.completion_tokens} tokens, {event.usage.accepted_draft_tokens} from drafts")
    return text


async def main() -> None:
    # Otherwise answers are given without drafts while the first start ever compiles the drafter.
    config = EngineConfig(
        "bundled", dtype="float32", wait_for_drafter=True, draft=DraftConfig(max_scope_bytes=16 << 20)
    )
    engine = await AsyncEngine.start(config)
    try:
        for text in await asyncio.gather(*(answer(engine, name) for name in NAMES)):
            print(text)
        try:
            await anext(engine.stream("text", SamplingParams(top_p=1.5)))
        except BatchserveError as error:
            print(f"{error.reason}: {error}")
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
