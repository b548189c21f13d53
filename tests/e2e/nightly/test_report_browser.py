"""The report and the live page in a real browser: nothing fetched, nothing complained of, readable.

Needs a Chromium on the machine (``apt-get install chromium``) and the extra ``browser``
(``pip install 'coterie[browser]'``). ``COTERIE_SCREENSHOTS`` names a folder to keep pictures in,
``COTERIE_REPORT`` the report to show in them: ``docs/images`` has the demo's.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.synthetic import write_run
from coterie.server.report.command import write_report
from coterie.server.report.web import LivePage, make_server

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install 'coterie[browser]'"
)
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="no axe: pip install 'coterie[browser]'"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium on PATH: apt-get install chromium", allow_module_level=True)


LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
OVERLAPS = """() => {
  const bad = [];
  for (const svg of document.querySelectorAll('figure svg')) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim());
    const boxes = texts.map(t => t.getBoundingClientRect());
    boxes.forEach((b, i) => {
      if (b.left < box.left - 1 || b.right > box.right + 1
          || b.top < box.top - 1 || b.bottom > box.bottom + 1)
        bad.push('outside: ' + texts[i].textContent);
      for (let j = 0; j < i; j++) {
        const o = boxes[j];
        const w = Math.min(b.right, o.right) - Math.max(b.left, o.left);
        const h = Math.min(b.bottom, o.bottom) - Math.max(b.top, o.top);
        if (w > 3 && h > 4) bad.push(texts[i].textContent + ' over ' + texts[j].textContent);
      }
    });
  }
  return bad;
}"""
SMALL_TEXT = """() => [...document.querySelectorAll('figure svg text')]
  .filter(t => t.getBoundingClientRect().height && t.textContent.trim())
  .map(t => [parseFloat(getComputedStyle(t).fontSize), t.getScreenCTM()])
  .map(([size, m]) => size * Math.hypot(m.a, m.b))
  .filter(size => size < 9.5)"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every kind of trouble in its names."""
    root = tmp_path_factory.mktemp("runs")
    names = ["<script>alert(1)</script>", *(f"hospital-north-{i}" for i in range(9))]
    for strategy in ("hcct", "independent", "fedavg"):
        write_run(
            root / f"{strategy}-1", num_silos=10, num_rounds=12, strategy=strategy, names=names
        )
    return write_report("hcct-1", root=root)[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, url: str, width: int, scheme: str) -> tuple[Any, list[str], list[str]]:
    """A page, what its console said, and what it asked for beside itself."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    others = [one for one in asked if one != url and not one.startswith("data:")]
    return page, said, others


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_report_is_readable_and_asks_for_nothing(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    page, said, others = opened(browser, report.as_uri(), width, scheme)
    assert said == [] and others == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
    assert "<script>alert(1)</script>" in page.inner_text("main")
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    visible = [svg for svg in page.query_selector_all("figure svg") if svg.is_visible()]
    assert len(visible) == len(page.query_selector_all("figure")) >= 8
    assert all(svg.get_attribute("role") == "img" for svg in visible)
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(SMALL_TEXT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "also with its tables"
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.context.close()


def keep(page: Any, name: str) -> None:
    if os.environ.get("COTERIE_SCREENSHOTS"):
        folder = Path(os.environ["COTERIE_SCREENSHOTS"])
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(folder / f"{name}.png"), full_page=True)


@pytest.mark.skipif("COTERIE_REPORT" not in os.environ, reason="COTERIE_REPORT names no report")
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_pictures_of_the_documentation_are_made(browser: Any, width: int, scheme: str) -> None:
    file = Path(os.environ["COTERIE_REPORT"]).resolve()
    page, said, others = opened(browser, file.as_uri(), width, scheme)
    assert said == [] and others == []
    keep(page, f"report-{width}-{scheme}")
    page.context.close()


def test_the_report_is_used_with_the_keyboard(browser: Any, report: Path) -> None:
    page, _, _ = opened(browser, report.as_uri(), 1280, "light")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the pictures"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.focus("#curves summary")
    page.keyboard.press("Enter")
    assert page.is_visible("#curves table")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "what has the focus is seen"
    page.context.close()


def test_the_live_page_fills_while_the_run_goes_on(browser: Any, tmp_path: Path) -> None:
    bound = make_server(LivePage(None, tmp_path), host="127.0.0.1", port=0, token="word")
    thread = threading.Thread(target=bound.serve_forever, args=(0.05,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{bound.server_address[1]}/"
        page, said, others = opened(browser, f"{url}word/", 1280, "light")
        assert page.inner_text("h1") == "coterie" and page.url == url
        write_run(tmp_path / "run", num_silos=4, num_rounds=3, status="running")
        page.wait_for_selector("#groups", timeout=60_000)
        page.click("#groups summary")
        write_run(tmp_path / "run", num_silos=4, num_rounds=5)
        page.wait_for_selector(".subtitle:has-text('5 of 5')", timeout=60_000)
        assert page.is_visible("#groups table"), "what was opened stays open"
        page.wait_for_selector("#live:has-text('completed')", timeout=60_000)
        assert said == [] and set(others) <= {url, f"{url}body"}
        page.context.close()
    finally:
        bound.shutdown()
        thread.join()
        bound.server_close()


def test_two_hundred_silos_and_five_hundred_rounds_stay_readable(
    browser: Any, tmp_path: Path
) -> None:
    for strategy in ("hcct", "independent"):
        write_run(tmp_path / f"{strategy}-1", num_silos=200, num_rounds=500, strategy=strategy)
    (file,) = write_report("hcct-1", root=tmp_path)
    assert file.stat().st_size < 10_000_000
    for width in (1280, 390):
        page, said, _ = opened(browser, file.as_uri(), width, "dark")
        assert said == [] and page.evaluate(SMALL_TEXT) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert "at most 24 are drawn" in page.inner_text("#groups")
        keep(page, f"many-{width}-dark")
        page.context.close()
    assert json.loads(write_report("hcct-1", kind="json", root=tmp_path)[0].read_text())["silos"]
