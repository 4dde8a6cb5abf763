"""The console in a real browser: it loads, lives under load, opens waterfalls, sends prompts; by mouse, keys and on a phone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdmesh.client.client import AsyncClient
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from router.config import RouterConfig
from tests.pdmesh.console.conftest import Running, running_console
from tests.pdmesh.console.made import MODEL, Made, Script, made_router, some_requests
from tests.support.tiny_models import make_tiny_model

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

pytestmark = pytest.mark.timeout(300)
QUESTION = "What is the capital of France?"
has_traces = any(field.name == "telemetry" for field in fields(RouterConfig))


@dataclass
class Seen:
    """A page of a console, and what went wrong in it."""

    page: Page
    console: Running
    problems: list[str]


@asynccontextmanager
async def shown(browser: Browser, url: str, problems: list[str], **context: Any) -> AsyncIterator[Page]:
    """A page that has loaded; nothing may come from anywhere but the console."""
    opened = await browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    page = await opened.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else problems.append(request.url))
    await page.goto(url)
    await page.wait_for_selector(".node")
    try:
        yield page
    finally:
        await opened.close()


@asynccontextmanager
async def seen(browser: Browser, count: int = 120, **context: Any) -> AsyncIterator[Seen]:
    """A page in front of a made mesh that has served so many requests. It has to be without errors."""
    script, problems = Script(), list[str]()
    async with made_router(script) as router, running_console(router, script) as console:
        await console.take(*some_requests(count, time.time_ns()))
        async with shown(browser, console.url, problems, **context) as page:
            yield Seen(page, console, problems)
            assert problems == []


async def text(page: Page, selector: str) -> str:
    return str(await page.locator(selector).first.text_content())


async def test_it_loads_and_shows_every_part(browser: Browser) -> None:
    async with seen(browser) as view:
        page = view.page
        assert await text(page, "#connection") == "live"
        names = await page.locator(".node .name").all_text_contents()
        assert names == ["router-0", "prefill-0", "prefill-1", "decode-0", "decode-1"]
        assert await page.locator(".flow.live").count() >= 4
        for part in ("#ttft", "#tpot"):
            assert await page.locator(f"{part} .column").count() > 4
            assert "objective" in await text(page, f"{part} .objective-label")
        assert await page.locator("#requests li").count() == 25
        assert await page.locator("#kv .pool").count() == 4
        notes = " ".join(await page.locator("#kv .pool-note").all_text_contents())
        assert "5200 tokens restored from tiers: 6.5 s of computing saved" in notes
        assert "5200 tokens restored from tiers: 0.4 s slower than computing" in notes
        await page.wait_for_selector("#decisions li")
        assert "least cost" in await text(page, "#decisions .why")
        await page.get_by_role("tab", name="Autoscaler").click()
        assert "pdmesh up --autoscale" in await text(page, "#decisions")


async def test_without_a_request_it_says_what_to_do(browser: Browser) -> None:
    async with seen(browser, count=0) as view:
        assert "Type a prompt" in await text(view.page, "#ttft")
        assert "No request yet" in await text(view.page, "#requests")
        assert "Choose a request" in await text(view.page, "#trace")


async def test_it_follows_what_happens_without_being_loaded_again(browser: Browser) -> None:
    async with seen(browser, count=5) as view:
        page = view.page
        for number in range(6, 12):
            made = Made(0, request_id=f"live-{number}")
            await view.console.take(replace(made, start_ns=time.time_ns() - round(made.total * 1e6)))
            await page.wait_for_function("n => document.querySelectorAll('#requests li').length === n", arg=number)
        assert f"{number} requests" in await text(page, "#ttft .marks")


async def test_a_click_on_a_bar_leads_to_a_trace(browser: Browser) -> None:
    async with seen(browser) as view:
        page = view.page
        bar = page.locator("#ttft .column").last
        label = str(await bar.get_attribute("aria-label"))
        await bar.click()
        await page.wait_for_selector("#trace .wf-row")
        assert label.split(" from ")[0] in await text(page, "#requests .note-line")
        assert "First token after" in await text(page, "#trace .verdict")
        spans = await page.locator("#trace .wf-row").evaluate_all("rows => rows.map(row => row.dataset.span)")
        assert {"route", "reserve", "prefill.queue", "prefill.compute", "kv.push", "kv.exposed", "decode"} <= set(spans)
        compute = page.locator('.wf-row[data-span="prefill.compute"]')
        assert await compute.locator(".wf-tick").count() == 3
        await compute.locator(".wf-name").click()
        assert "pdmesh.cached_tokens" in await text(page, "#trace .details")
        before = await text(page, "#trace .wf-axis span:last-child")
        await page.get_by_role("button", name="To the first token").click()
        assert await text(page, "#trace .wf-axis span:last-child") != before


async def test_the_slowest_are_listed_by_their_first_token(browser: Browser) -> None:
    async with seen(browser) as view:
        await view.page.get_by_role("tab", name="Slowest").click()
        labels = await view.page.locator("#requests .time").all_inner_texts()
        values = [_milliseconds(label) for label in labels]
        assert len(values) == 25 and values == sorted(values, reverse=True)


def _milliseconds(label: str) -> float:
    number, unit = label.split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


async def test_the_keyboard_alone_is_enough(browser: Browser) -> None:
    async with seen(browser) as view:
        page = view.page
        await page.locator("#ttft .column").first.focus()
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#trace .wf-row")
        await page.locator("#request-tabs [aria-selected=true]").focus()
        await page.keyboard.press("ArrowRight")
        assert await page.evaluate("document.activeElement.textContent") == "Recent"
        await page.locator("#prompt").fill(QUESTION)
        await page.locator("#prompt").press("Control+Enter")
        await page.wait_for_function("() => document.getElementById('answer').textContent === 'Paris is it.'")


async def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser) -> None:
    def brightness(page: Page) -> Any:
        return page.evaluate("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")

    async with seen(browser, count=3, color_scheme="dark") as view:
        page = view.page
        assert await brightness(page) < 60
        await page.locator("#theme").click()
        assert await brightness(page) > 200
        await page.reload()
        await page.wait_for_selector(".node")
        assert await brightness(page) > 200


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
async def test_nothing_is_wider_than_the_screen(browser: Browser, width: int) -> None:
    async with seen(browser, viewport={"width": width, "height": 800}, reduced_motion="reduce") as view:
        await view.page.locator("#requests button").first.click()
        await view.page.wait_for_selector("#trace .wf-row")
        assert await view.page.evaluate("document.documentElement.scrollWidth") <= width
        assert await view.page.locator(".flow.pulse:visible").count() == 0


async def test_what_mesh_and_spans_say_is_text_and_nothing_else(browser: Browser) -> None:
    nasty = "<img src=x onerror=document.title='broken'>"
    async with seen(browser, count=0) as view:
        page, made = view.page, Made(0, request_id=nasty, model=MODEL, prefill=nasty, decode="decode-0", error=nasty)
        await view.console.take(replace(made, start_ns=time.time_ns() - round(made.total * 1e6)))
        await page.locator("#requests button").first.click()
        await page.wait_for_selector("#trace .wf-row")
        assert nasty in await text(page, "#requests .what") and await page.title() == "pdmesh console"
        assert await page.locator("#main img").count() == 0


async def test_a_console_that_goes_away_is_noticed(browser: Browser) -> None:
    script, problems = Script(), list[str]()
    async with made_router(script) as router:
        async with running_console(router, script) as console:
            opened = shown(browser, console.url, problems)
            page = await opened.__aenter__()
            assert await text(page, "#connection") == "live"
        await page.wait_for_function("() => document.getElementById('connection').textContent === 'reconnecting'")
        assert "The console does not answer. What stands here was true at " in await text(page, "#notices")
        assert await page.locator(".flow.pulse:visible").count() == 0, "what flows here would be of before"
        await opened.__aexit__(None, None, None)


@pytest.mark.mesh
@pytest.mark.skipif(not has_traces, reason="routers and workers of this version send no traces")
async def test_a_real_mesh_is_seen_under_load_and_answers_a_prompt_with_its_own_waterfall(
    browser: Browser, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    config = LocalMeshConfig(model=str(model), port=0, num_threads=1, console_port=0, log_dir=str(tmp_path / "logs"))
    problems = list[str]()
    async with LocalMesh(config) as mesh, shown(browser, mesh.console_url, problems) as page:
        async with AsyncClient(mesh.router_addresses) as client:
            asked = [
                client.generate(f"{number} once upon a time", max_tokens=8, ignore_eos=True, mode="remote", timeout=60)
                for number in range(12)
            ]
            await asyncio.gather(*asked)
        await page.wait_for_function("() => document.querySelectorAll('#requests li').length === 12")
        assert await page.locator(".flow.live.prefill").count() == 1
        await page.locator("#requests button").first.click()
        await page.wait_for_selector('#trace [data-span="prefill.compute"]')
        await page.locator("#prompt").fill(QUESTION)
        await page.locator("#send").click()
        await page.wait_for_selector('#answer-trace [data-span="decode"]')
        assert "First token after" in await text(page, "#answer-trace .verdict") and await text(page, "#answer")
    assert problems == []
