"""Chromium, driven by playwright; whoever lacks one of them skips these tests, by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from playwright.async_api import Browser

VARIABLE = "PDMESH_CHROMIUM"


def chromium() -> str:
    """Its path; "" where there is none."""
    return os.environ.get(VARIABLE) or shutil.which("chromium") or shutil.which("chromium-browser") or ""


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    """Headless."""
    driver = pytest.importorskip("playwright.async_api", reason="playwright is not installed: pip install playwright")
    if not chromium():
        pytest.skip("chromium is not installed: apt-get install chromium, or name one in PDMESH_CHROMIUM")
    async with driver.async_playwright() as playwright:
        # Containers rarely allow its sandbox; the only page that it sees is ours.
        started = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield started
        await started.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them drive a browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")
