"""The report in a headless Chromium: two widths, light and dark, 4,100 runs. Reference: what a reader sees."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import synthetic

from reports.build import build

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.chromium, pytest.mark.timeout(300)]

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip

SMALL_TEXT = """() => [...document.querySelectorAll("body *")].filter((e) => {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(e.tagName) || !e.getClientRects().length) return false;
  const scale = e.ownerSVGElement ? e.getScreenCTM().a : 1;
  return parseFloat(getComputedStyle(e).fontSize) * scale < 11;
}).map((e) => e.outerHTML.slice(0, 120))"""

OVERLAPS = """() => [...document.querySelectorAll("svg.figure")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].filter((t) => t.textContent.trim());
  const boxes = texts.map((t) => t.getBoundingClientRect());
  const found = [];
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const [a, b] = [boxes[i], boxes[j]];
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 1 && y > 3) found.push([svg.dataset.figure, texts[i].textContent, texts[j].textContent]);
  }
  const frame = svg.getBoundingClientRect();
  texts.forEach((t, i) => { if (boxes[i].right > frame.right + 1) found.push([t.textContent, "leaves the figure"]); });
  return found;
})"""

SPEEDS = """() => [...document.querySelectorAll("tr[data-status=ok] td:nth-child(3)")]
  .map((cell) => parseFloat(cell.firstChild.textContent.replace(",", "")))"""

SORT = """async () => {
  const begin = performance.now();
  document.querySelector("th[data-sort=tps_per_gpu]").click();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  return performance.now() - begin;
}"""

VISIBLE = "() => [...document.querySelectorAll('tr[data-run-id]')].filter((r) => !r.hidden).length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as p:
        started = p.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forty")
    synthetic.forty(folder / "forty strategies")
    build(folder / "forty strategies", folder / "out")
    return folder / "out" / "index.html"


def visit(browser: Browser, path: Path, width: int = 1280, scheme: Any = "light") -> tuple[Page, list[str]]:
    """(the loaded page, what its console and the network complained about)."""
    page = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme).new_page()
    faults: list[str] = []
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: faults.append(str(e)))
    page.on("request", lambda r: faults.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
    page.goto(path.as_uri())
    return page, faults


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_reads_well(browser: Browser, forty: Path, width: int, scheme: str) -> None:
    page, faults = visit(browser, forty, width, scheme)
    assert faults == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALL_TEXT) == []
    assert page.evaluate(OVERLAPS) == []
    for selector in (".winner", "dl.facts"):
        box = page.locator(selector).bounding_box()
        assert box is not None and box["y"] + box["height"] < 844, f"{selector} is below the fold"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 3 * 128
    assert dark == (scheme == "dark")


def test_sort_filter_axes_and_copy(browser: Browser, forty: Path) -> None:
    page, faults = visit(browser, forty)
    page.click("th[data-sort=tps_per_gpu]")
    assert page.evaluate(SPEEDS) == sorted(page.evaluate(SPEEDS), reverse=True)
    page.click("th[data-sort=tps_per_gpu]")
    assert page.evaluate(SPEEDS) == sorted(page.evaluate(SPEEDS)) and len(page.evaluate(SPEEDS)) == 38
    assert page.locator("tr[data-run-id]").last.get_attribute("data-status") != "ok"  # no figure sorts last, either way
    page.fill("#filter", "oom")
    assert page.evaluate(VISIBLE) == 2
    page.fill("#filter", '"TP 4" compile')
    assert page.evaluate(VISIBLE) == 3
    page.fill("#filter", "")
    assert page.evaluate(VISIBLE) == 41
    assert page.locator("#map-tps td.failed").all_inner_texts().count("oom") == 2
    page.select_option("#axis-x", "parallel.tp")
    page.select_option("#axis-y", "precision.float8")
    assert page.locator("#map-tps thead th").all_inner_texts() == ["Float8 \\ TP", "1", "2", "4"]
    best = page.locator("#map-tps td.best")
    assert best.inner_text().startswith("2,136") and "FSDP 4" in best.inner_text()
    best.click()
    assert page.evaluate(VISIBLE) == 1 and best.get_attribute("data-run") == page.input_value("#filter")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("tr[data-run-id]:not([hidden]) button.copy").click()
    page.wait_for_function("document.querySelector('tr[data-run-id]:not([hidden]) button.copy').textContent !== 'copy'")
    assert faults == []


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    for i in range(2):
        s = synthetic.spec(model={"name": synthetic.HOSTILE}, compile={"enable": bool(i)}, train={"seed": i})
        synthetic.write(tmp_path / "in", synthetic.result(s, 1000 + i), losses=synthetic.decay())
    build(tmp_path / "in", tmp_path / "out")
    page, faults = visit(browser, tmp_path / "out" / "index.html", 390)
    assert faults == [] and page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "<img src=x onerror=alert(1)>" in page.locator("#summary").inner_text()


@pytest.mark.budget
def test_thousands_of_runs(browser: Browser, tmp_path: Path, budget: Callable[[str, float, float, str], None]) -> None:
    """4,100 runs: written in 30 s, under 15 MB, painted and sorted within a second."""
    synthetic.many(tmp_path / "in")
    begin = time.monotonic()
    build(tmp_path / "in", tmp_path / "out")
    budget("report of 4,100 runs", time.monotonic() - begin, 30, "s")
    index = tmp_path / "out" / "index.html"
    budget("report of 4,100 runs, HTML", index.stat().st_size / 1e6, 15, "MB")
    page, faults = visit(browser, index)
    assert faults == [] and page.locator("tr[data-run-id]").count() == 4100
    assert page.evaluate(VISIBLE) == 100
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    budget("report of 4,100 runs, first paint", paint / 1000, 1, "s")
    budget("report of 4,100 runs, sort", page.evaluate(SORT) / 1000, 1, "s")
    page.fill("#filter", "oom simulated")
    assert 0 < page.evaluate(VISIBLE) <= 100
    page.click("#next")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
