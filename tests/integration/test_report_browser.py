"""The report of a thousand trials in a real browser: size, speed, silence, accessibility."""

from __future__ import annotations

from pathlib import Path

import pytest
from headless import SCREENSHOTS, chromium, open_seconds
from synthetic_study import make_records, make_study

from tuner.report import study_report, write_page

TRIALS = 60


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


def written(folder: Path, trials: int) -> Path:
    directory = make_study(folder / "study", make_records(trials))
    path = directory.path / "report.html"
    write_page(study_report(directory.path), path)
    return path


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("report"), TRIALS)


@pytest.fixture
def page(browser, page_file):
    """The open page; at the end, nothing but the file was asked for and nothing complained."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(120_000)
    opened = context.new_page()
    asked, complaints = [], []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(page_file.as_uri(), wait_until="load")
    yield opened
    context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert complaints == []


def test_a_thousand_trials_are_small_and_open_at_once(browser, tmp_path) -> None:
    path = written(tmp_path, 1000)
    assert path.stat().st_size < 5_000_000
    assert open_seconds(browser, path)["processor_s"] < 2.0


def test_hovering_a_point_tells_its_candidate_and_clicking_leads_to_its_row(page) -> None:
    point = page.locator(".mark.best").first
    point.scroll_into_view_if_needed()
    point.hover()
    tip = page.locator("#tip")
    assert "tensor_model_parallel_size" in tip.inner_text()
    page.screenshot(path=SCREENSHOTS / "report-pareto.png")
    point.click()
    assert "(best)" in page.locator("tr.marked").inner_text()


def test_the_table_filters_and_sorts(page) -> None:
    page.get_by_role("searchbox").fill("completed full")
    shown = page.locator("#rows tbody tr:visible")
    assert 0 < shown.count() < TRIALS
    assert page.get_by_role("status").inner_text() == f"{shown.count()} of {TRIALS}"
    heading = page.get_by_role("button", name="tflops_per_gpu")
    heading.click()
    heading.click()
    values = [float(text) for text in shown.locator("td:nth-child(3)").all_inner_texts()]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong(page, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)
    found = Axe().run(page)
    page.screenshot(path=SCREENSHOTS / f"report-{scheme}.png", full_page=True)
    assert found.violations_count == 0, found.generate_report()


def test_print_shows_every_row(page) -> None:
    page.emulate_media(media="print")
    assert page.locator("#filter").is_hidden()
    table = page.locator(".scroll")
    assert table.evaluate("box => box.scrollHeight <= box.clientHeight + 1")
