"""/live and the page that reads it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batchserve.engine import watchers
from batchserve.server.keys import add_key
from batchserve.server_config import ServerConfig
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.harness import Served, core_of, serving, until
from tests.server.http.raw import post, request

ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 180, "ignore_eos": True, "temperature": 0, "draft_scope": "one"}


@asynccontextmanager
async def looking(url: str, key: str = "") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The events of /live as they come."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"GET /live HTTP/1.1\r\nHost: localhost\r\n{authorization}\r\n".encode())

    async def events() -> AsyncIterator[dict[str, Any]]:
        async for line in reader:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    try:
        yield events()
    finally:
        writer.close()


async def steps_of(events: AsyncIterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        async for event in events:
            if event["kind"] == "step":
                found.append(event)
            if len(found) == count:
                break
    return found


async def test_steps_are_shown_while_somebody_looks(serve_tiny: Serve):
    async with serve_tiny(decoding_length=8, step_s=0.02) as served:
        core = core_of(served.engine)
        await post(served.url, "/v1/completions", ENDLESS)  # so that there is something to draft from
        assert core.watch is None
        async with looking(served.url) as events:
            figures = await anext(events)
            assert (figures["kind"], figures["model"]) == ("figures", served.engine.info.name)
            assert figures["values"]["completion_tokens_total"] == 180
            assert sum(figures["histograms"]["time_to_first_token_seconds"]["counts"]) == 1
            assert core.watch is not None
            asking = asyncio.create_task(post(served.url, "/v1/completions", {**ENDLESS, "request_id": "mine"}))
            steps = await steps_of(events, 6)
            await asking
        whole = (await asking).json
        requests = [one for step in steps for one in step["requests"]]
        assert {one["request_id"] for one in requests} == {"mine"}
        drafted = [one for one in requests if one["texts"]]
        assert drafted
        for one in drafted:
            assert len(one["texts"]) == len(one["parents"]) == len(one["token_ids"])
            path = one["accepted"]
            assert [one["parents"][node] for node in path] == [-1, *path][: len(path)]
            # The accepted nodes are what the step added, but for its last token.
            assert [one["token_ids"][node] for node in path] == one["new_token_ids"][: len(path)]
            assert one["num_prompt_tokens"] == 3
        assert any(one["accepted"] for one in drafted)
        assert whole["usage"]["completion_tokens"] == 180
        await until(lambda: core.watch is None, 60)  # nobody looks any more


async def test_a_key_sees_its_tenant_and_an_admin_sees_all(serve_tiny: Serve, tmp_path: Path):
    path = tmp_path / "keys.yaml"
    keys = {name: add_key(path, tenant=name, is_admin=name == "house") for name in ("a", "b", "house")}
    server = ServerConfig(port=0, http_port=0, keys=str(path))
    async with serve_tiny(server=server, step_s=0.02) as served:
        assert (await request(served.url, "/live")).status == 401
        seen: dict[str, set[str]] = {}
        figures: dict[str, dict[str, Any]] = {}

        async def look(name: str) -> None:
            async with looking(served.url, keys[name]) as events, asyncio.timeout(60):
                async for event in events:
                    if event["kind"] == "figures":
                        figures[name] = event
                    else:
                        seen.setdefault(name, set()).update(one["request_id"] for one in event["requests"])

        lookers = [asyncio.create_task(look(name)) for name in keys]
        await until(lambda: len(figures) == 3, 60)
        asking = [
            post(served.url, "/v1/completions", {**ENDLESS, "request_id": "x"}, Authorization=f"Bearer {keys[name]}")
            for name in ("a", "b")
        ]
        await asyncio.gather(*asking)
        await until(lambda: figures["a"].get("values", {}).get("completion_tokens_total") == 180, 60)
        for looker in lookers:
            looker.cancel()
        await asyncio.gather(*lookers, return_exceptions=True)
        assert seen == {"a": {"x"}, "b": {"x"}, "house": {"a/x", "b/x"}}
        assert "acceptance" not in figures["a"]
        assert "acceptance" in figures["house"]


async def test_where_anybody_may_call_nobody_sees_requests(serve_tiny: Serve):
    server = ServerConfig(host="0.0.0.0", port=0, http_port=0, allow_unauthenticated=True)
    async with serve_tiny(server=server, step_s=0.01) as served:
        url = served.url.replace("0.0.0.0", "127.0.0.1")
        async with looking(url) as events:
            assert (await anext(events))["values"]["completion_tokens_total"] == 0
            await post(url, "/v1/completions", ENDLESS)
            event = await anext(events)
            assert event["kind"] == "figures"


async def test_lookers_are_bounded_and_end_with_the_server(monkeypatch: pytest.MonkeyPatch, serve_tiny: Serve):
    monkeypatch.setattr(watchers, "MAX_WATCHERS", 1)
    async with serve_tiny() as served:
        async with looking(served.url) as events:
            await anext(events)
            refused = await request(served.url, "/live")
            assert (refused.status, refused.error["code"]) == (429, "too_many_watchers")
            async with asyncio.timeout(30):
                assert await served.server.drain()
                last = [event async for event in events][-1]
        assert last["error"]["code"] == "unavailable"


async def test_the_page_needs_nothing_from_elsewhere():
    engine: Any = FakeEngine()
    async with serving(engine) as served:
        for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
            answer = await request(served.url, path)
            assert (answer.status, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text
            assert "https://" not in text
        assert (await request(served.url, "/", Host="attacker.example")).status == 403


@pytest.mark.slow
async def test_the_page_in_a_browser(bundled: Served):
    playwright = pytest.importorskip("playwright.async_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    url = bundled.url
    async with playwright.async_playwright() as run:
        browser = await run.chromium.launch(executable_path=chromium)
        for scheme in ("light", "dark"):
            page = await browser.new_page(color_scheme=scheme)
            said: list[str] = []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            await page.goto(url)
            await page.wait_for_selector("#state.live")
            hostile = "<img src=x onerror=document.title='gone'>"
            await page.fill("#prompt", f"Convert this record to JSON.\nname: {hostile}\ncount: 7012")
            await page.click("#send")
            await page.wait_for_selector("#requests .request .about b")
            await page.wait_for_selector("#send:not([disabled])")
            assert await page.text_content("#answer")
            assert "draft tokens accepted" in str(await page.text_content("#answer-note"))
            assert await page.locator("#answer .run").count() > 0
            assert await page.locator("#answer img, #requests img").count() == 0
            await page.wait_for_selector("#charts .card svg path")
            assert await page.locator("#charts .card").count() == 6
            assert await page.title() == "batchserve"
            back = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (back == "rgb(21, 23, 26)") == (scheme == "dark")
            assert not said
            await page.close()
        await browser.close()
