"""The console where it is hard to use: many tabs, weak contrast, routers that never answer, a trace that is open already."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.browser.test_console import seen, shown, text
from tests.pdmesh.console.conftest import running_console
from tests.pdmesh.console.made import Made, Script, made_router

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = pytest.mark.timeout(300)


async def test_a_click_on_a_red_bar_opens_one_that_was_late_whatever_is_open(browser: Browser) -> None:
    async with seen(browser, count=0) as view:
        page, now = view.page, time.time_ns()
        late = Made(now - 4_000_000_000, request_id="late", prefill_queue=200.0, goals=(150, 16))
        kept = replace(late, start_ns=now - 2_000_000_000, request_id="kept", goals=(1000, 16))
        await view.console.take(late, kept)
        await page.get_by_role("button", name="Request kept").click()
        await page.wait_for_selector("#trace .wf-row")
        await page.locator("#ttft .column").last.click()
        late_words = "() => document.querySelector('#trace .bad-text')?.textContent.includes('over the objective')"
        await page.wait_for_function(late_words)
        shown = await page.locator("#requests [aria-current=true]").get_attribute("aria-label")
        assert shown is not None and shown.startswith("Request late,")


async def test_a_page_that_nobody_sees_lets_its_connection_go(browser: Browser) -> None:
    """Browsers have six for all pages of one server: eight tabs would keep each other from loading."""
    async with seen(browser, count=3) as view:
        page = view.page
        hide = "value => { Object.defineProperty(document, 'hidden', { value, configurable: true });"
        hide += " document.dispatchEvent(new Event('visibilitychange')); }"
        await page.evaluate(hide, True)
        assert await text(page, "#connection") == "paused"
        made = Made(0, request_id="unseen")
        await view.console.take(replace(made, start_ns=time.time_ns() - round(made.total * 1e6)))
        await page.wait_for_timeout(1500)
        assert await page.locator("#requests li").count() == 3
        await page.evaluate(hide, False)
        await page.wait_for_function("() => document.querySelectorAll('#requests li').length === 4")
        assert await text(page, "#connection") == "live"


# Of every text on the page: its colour against what lies behind it, by WCAG 2.
CONTRASTS = """() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = rgba(getComputedStyle(at).backgroundColor);
      if (found[3] > 250) return found;
    }
    return rgba(getComputedStyle(document.body).backgroundColor);
  };
  const low = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const isHidden = !element.checkVisibility() || element.closest(".wf-time, option, noscript, script, .skip, .sr");
    if (!walker.currentNode.data.trim() || isHidden) continue;
    const style = getComputedStyle(element);
    const ink = rgba(element instanceof SVGElement ? style.fill : style.color);
    const pair = [light(ink), light(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.add(`${element.tagName}.${element.getAttribute("class")} ${ratio.toFixed(2)}`);
  }
  return [...low];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_stands_out_from_what_is_behind_it(browser: Browser, scheme: str) -> None:
    async with seen(browser, color_scheme=scheme) as view:
        await view.page.locator("#requests button").first.click()
        await view.page.wait_for_selector("#trace .wf-row")
        await view.page.locator("#trace .wf-name").first.click()
        assert await view.page.evaluate(CONTRASTS) == []


async def test_routers_that_never_answered_are_shown_each(browser: Browser) -> None:
    script, problems = Script(problem=grpc.StatusCode.UNAVAILABLE), list[str]()
    async with made_router() as good, made_router(script) as first, made_router(script) as second:
        routers = f"{good},{first},{second}"
        async with running_console(routers, script) as console, shown(browser, console.url, problems) as page:
            await page.wait_for_function("() => document.querySelectorAll('.node.lost').length === 2")
            assert [first, second] == await page.locator(".node.lost .name").all_text_contents()
            assert await page.locator("#notices .notice").count() == 2
    assert problems == []


async def test_a_console_that_hangs_is_away_until_it_goes_on(browser: Browser) -> None:
    """It closes nothing, so only its silence tells."""
    command = ("-m", "pdmesh.console", "--port", "0", "--otlp-port", "0", "--routers", "127.0.0.1:1", "--exit-with-parent")
    console = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    try:
        assert console.stdout is not None
        url = json.loads(await console.stdout.readline())["http_url"]
        page = await browser.new_page()
        await page.goto(url)
        said = "() => document.getElementById('connection').textContent === '{}'"
        await page.wait_for_function(said.format("live"))
        console.send_signal(signal.SIGSTOP)
        await page.wait_for_function(said.format("reconnecting"))
        assert "The console does not answer" in await page.locator("#notices").inner_text()
        console.send_signal(signal.SIGCONT)
        await page.wait_for_function(said.format("live"))
        assert "The console does not answer" not in await page.locator("#notices").inner_text()
    finally:
        console.kill()
        await console.wait()
