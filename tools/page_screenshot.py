"""Takes the picture of the page at / that the README shows.

    python -m tools.page_screenshot [--out docs/images/page.png] [--dark]

Starts a real server with the bundled model, loads it with four streams, asks in the playground, and takes a picture
with headless Chromium, which it needs (Debian: chromium), beside the Python package playwright.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path

from batchserve.demo.prompts import PROMPTS
from batchserve.demo.server_process import running_server

STREAMS = 4


async def ask(url: str, i: int, is_over: asyncio.Event) -> None:
    """Keeps one stream busy."""
    import httpx2

    async with httpx2.AsyncClient(timeout=60) as client:
        number = 0
        while not is_over.is_set():
            text = PROMPTS[(i + number) % len(PROMPTS)].message
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 300, "temperature": 1.3}
            body["request_id"] = f"user-{i}-{number}"
            await client.post(f"{url}/v1/chat/completions", json=body)
            number += 1


async def take(out: Path, *, is_dark: bool) -> None:
    from playwright.async_api import async_playwright

    options = ["--wait-for-drafter", "--decoding-length", "16", "--log-level", "warning"]
    async with running_server(options, print) as server, async_playwright() as run:
        browser = await run.chromium.launch(executable_path=shutil.which("chromium"))
        scheme = "dark" if is_dark else "light"
        page = await browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme=scheme)  # type: ignore[arg-type]
        page.on("console", lambda message: print("console:", message.text, file=sys.stderr))
        await page.goto(server.url)
        is_over = asyncio.Event()
        streams = [asyncio.create_task(ask(server.url, i, is_over)) for i in range(STREAMS)]
        await asyncio.sleep(25)
        await page.click("#send")
        await page.wait_for_selector("#send:not([disabled])", timeout=60_000)
        await asyncio.sleep(0.5)
        out.parent.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=out)
        is_over.set()
        await asyncio.gather(*streams)
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    asyncio.run(take(args.out, is_dark=args.dark))


if __name__ == "__main__":
    main()
