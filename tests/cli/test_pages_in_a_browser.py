"""Pages that commands write, in Chromium: whole on a phone and a screen, and for all readers."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

import firecaffe
import firecaffe.cli
from tests.kit.compared_runs import compared_runs

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")

WIDTHS_PX = (360, 1280)

# Elements whose text is cut off: wider or higher inside than outside, and not to be scrolled.
CUT = """() => [...document.querySelectorAll('body *')].filter(part => {
  const style = getComputedStyle(part);
  const hides = axis => ['hidden', 'clip'].includes(style['overflow' + axis]);
  return (hides('X') && part.scrollWidth > part.clientWidth + 1)
      || (hides('Y') && part.scrollHeight > part.clientHeight + 1);
}).map(part => part.outerHTML.slice(0, 80))"""
OVERFLOWS = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"
SMALLEST_PX = """() => Math.min(...[...document.querySelectorAll('p, td, li')].map(
  part => parseFloat(getComputedStyle(part).fontSize)))"""
WITHOUT_PICTURE = "() => [...document.images].filter(image => !image.naturalWidth).length"


def compared(folder: Path) -> str:
    runs = compared_runs(folder)
    words = ["compare", "--by", "recipe", "--html", str(folder / "page.html")]
    assert firecaffe.cli.main([*words, *runs]) == 0
    return (folder / "page.html").read_text("utf-8")


PLANNED = (
    *("--model", "alexnet", "--device", "v100", "--links", "1,25", "--workers", "1,2,4"),
    *("--global-batch-size", "256", "--micro-batch-size", "64"),
)


def planned(folder: Path) -> str:
    words = ["plan", *PLANNED, "--html"]
    assert firecaffe.cli.main([*words, str(folder / "page.html")]) == 0
    return (folder / "page.html").read_text("utf-8")


def answered(folder: Path) -> str:
    """An answer as a notebook shows it."""
    cell = firecaffe.plan(model="lenet", workers=[1, 2, 4])._repr_html_()
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>a cell</title>'
    return (
        f"{head}<meta name=viewport content=width=device-width><main><h1>A cell</h1>{cell}</main>"
    )


PAGES = {"compare": compared, "plan": planned, "notebook": answered}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=PAGES)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("matplotlib")
    return PAGES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=WIDTHS_PX)
def page(request: pytest.FixtureRequest, browser: Browser, text: str) -> Iterator[Page]:
    """The page; what script errors and requests fail it."""
    context = browser.new_context(viewport={"width": request.param, "height": 800})
    page = context.new_page()
    errors, requests = list[Any](), list[str]()
    page.on("pageerror", lambda error: errors.append(error))
    page.on("console", lambda message: errors.append(message.text))
    page.on("request", lambda asked: requests.append(asked.url))
    page.set_content(text)
    assert errors == []
    assert [url for url in requests if not url.startswith("data:")] == []
    yield page
    context.close()


def test_it_is_shown_whole(page: Page) -> None:
    assert page.evaluate(CUT) == []
    assert not page.evaluate(OVERFLOWS)
    assert page.evaluate(WITHOUT_PICTURE) == 0
    smallest: float | None = page.evaluate(SMALLEST_PX)
    assert smallest is None or smallest >= 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_read_it(page: Page, scheme: Any) -> None:
    """Contrast, names of pictures and headings, and what a keyboard reaches: axe-core's rules."""
    page.emulate_media(color_scheme=scheme)
    found = Axe().run(page)
    assert [rule["id"] for rule in found.response["violations"]] == []


def test_sliders_show_what_plan_computes(browser: Browser, tmp_path: Path) -> None:
    """Keys move the four sliders from the advised point to another one, with its own number."""
    page = browser.new_page()
    page.set_content(planned(tmp_path))
    at: dict[str, Any] = {
        "links": [25],
        "workers": [4],
        "global_batch_size": 256,
        "micro_batch_size": 64,
    }
    moves: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("link", "ArrowLeft", {"links": [1]}),
        ("workers", "ArrowLeft", {"workers": [2]}),
        ("batch", "ArrowRight", {"global_batch_size": 512}),
        ("precision", "ArrowRight", {"precision": "fp16"}),
    )
    for slider, key, to in moves:
        page.locator(f"#{slider}").press(key)
        at |= to
        (plan,) = firecaffe.plan(model="alexnet", device="v100", **at).plans
        fastest = min(row.step_s for row in plan.rows if row.exchange != "native")
        assert page.locator("#rate").inner_text() == (
            f"{plan.work.global_batch_size / fastest:,.0f} samples/s"
        )
        assert page.locator("#parts rect").count() > 4
    page.close()
