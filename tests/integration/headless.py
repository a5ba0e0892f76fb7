"""A real browser for tests: the machine's Chromium, driven headless."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).parents[2] / ".cache" / "screenshots"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A Playwright browser; the test is skipped where the machine has no Chromium."""
    found = os.environ.get("TUNER_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=list(_FLAGS))
        yield browser
        browser.close()


def open_seconds(browser: Any, page_file: Path) -> dict[str, float]:
    """What opening a file takes: `wall_s` until it is loaded, `processor_s` of the page's thread.

    Processor time is the same whatever else the machine does meanwhile.
    """
    context = browser.new_context()
    context.set_default_timeout(120_000)
    opened = context.new_page()
    session = context.new_cdp_session(opened)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    opened.goto(page_file.as_uri(), wait_until="load")
    metrics = session.send("Performance.getMetrics")["metrics"]
    spent = {one["name"]: one["value"] for one in metrics}
    wall = opened.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    context.close()
    return {"wall_s": wall / 1e3, "processor_s": spent["TaskDuration"]}
