"""The report as a reader has it: one file, the same bytes again, and a phone shows it whole."""

import base64
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import firecaffe.cli
from tests.unit.runs.test_curves import train, with_metrics

PHONE_PX = 390
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
]

# The page as a phone lays it out, in a frame of its own: what it says of itself is in the title.
FRAME = """<!doctype html><title>waiting</title>
<iframe width="{px}" height="800" srcdoc="{page}" onload="
  const inner = this.contentDocument, root = inner.documentElement;
  const sizes = [...inner.querySelectorAll('p, td, li')].map(
    part => parseFloat(getComputedStyle(part).fontSize));
  document.title = JSON.stringify({{
    overflows: root.scrollWidth > root.clientWidth,
    pictures: [...inner.images].map(picture => picture.naturalWidth > 0),
    smallest: Math.min(...sizes),
    rows: inner.querySelectorAll('tbody tr').length,
    asked: performance.getEntriesByType('resource').length,
  }});"></iframe>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two recipes of three seeds, on two workers."""
    tmp_path = tmp_path_factory.mktemp("runs")
    folders = []
    for letter, rate in (("a", 0.1), ("b", 0.5)):
        for seed in range(3):
            rows: list[dict[str, Any]] = [train(step, 2 / step) for step in range(1, 41)]
            rows.insert(20, {"kind": "test", "step": 20, "top1": 0.5 + 0.01 * seed})
            rows.append({"kind": "test", "step": 40, "top1": 0.7})
            run = with_metrics(
                tmp_path / f"{letter}{seed}",
                rows,
                recipe__train__seed=seed,
                recipe__solver__base_lr=rate,
                result__steps=40,
                result__top1=0.7 + 0.01 * seed,
                result__weights_sha256=f"{letter}{seed}" * 32,
                result__sent_bytes_per_step_by_rank=[1e6, 1e6],
            )
            folders.append(str(run.folder))
    return folders


def report(runs: list[str], path: Path, *words: str) -> str:
    assert (
        firecaffe.cli.main(["compare", "--by", "recipe", "--html", str(path), *words, *runs]) == 0
    )
    return path.read_text()


@pytest.fixture(scope="module")
def page(runs: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Their report."""
    return report(runs, tmp_path_factory.mktemp("page") / "report.html")


def test_it_needs_no_other_file_and_is_the_same_from_anywhere(
    page: str, runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(runs[0]).parent)
    assert report([Path(run).name for run in runs], tmp_path / "again.html") == page
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(addresses) == 6  # loss and accuracy against time, samples, bytes
    for address in addresses:
        kind, content = address.split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        assert b"<svg" in base64.b64decode(content)
    assert not re.search(r"https?://(?!www\.w3\.org)", re.sub(r'src="[^"]*"', "", page))


def test_every_figure_has_its_run(page: str, runs: list[str], tmp_path: Path) -> None:
    for folder in runs:
        assert f"<code>{Path(folder).name}</code>" in page
    assert "(weights a0a0a0a0a0a0)" in page
    assert "<code>solver.base_lr</code>" in page
    assert "Speedup is against A" in page
    last_first = report(runs, tmp_path / "other.html", "--baseline", f"{runs[-1]}/")
    assert f"<li>A: <code>{Path(runs[-1]).name}</code>" in last_first
    assert '<li class="missing">a tuned baseline (missing)' in page
    assert "±" in page


def test_what_is_unknown_has_no_picture(tmp_path: Path) -> None:
    run = with_metrics(
        tmp_path / "<one>",
        [train(1), {"kind": "test", "step": 1, "top1": 0.5}],
        result__steps=1,
        result__sent_bytes_per_step_by_rank=[None],
    )
    page = report([str(run.folder)], tmp_path / "report.html", "--target", "40")
    assert len(re.findall("<img", page)) == 4
    assert "time to 40.00%" in page
    assert "&lt;one&gt;" in page
    assert "<one>" not in page


def test_it_needs_no_other_word(
    page: str, runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal shows runs then, the page their groups as ever."""
    other = tmp_path / "other.html"
    assert firecaffe.cli.main(["compare", "--html", str(other), *runs]) == 0
    assert other.read_text() == page
    assert "seeds" not in capsys.readouterr().out


def test_what_cannot_be(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page = ["--by", "recipe", "--html", "nowhere/x.html"]
    assert firecaffe.cli.main(["compare", *page, *runs]) == 8
    assert "--html nowhere/x.html: there is no folder nowhere" in capsys.readouterr().err
    assert firecaffe.cli.main(["compare", *runs, runs[0]]) == 2
    assert "is given 2 times; a run counts once" in capsys.readouterr().err


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
@pytest.mark.parametrize("px", [PHONE_PX, 1200])
def test_a_browser_shows_it_whole(page: str, tmp_path: Path, px: int) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(px=px, page=html.escape(page)))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        [CHROMIUM, *FLAGS, profile, "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    title = re.search(r"<title>(.*?)</title>", shown.stdout)
    assert title is not None
    found = json.loads(html.unescape(title[1]))
    assert found == {
        "overflows": False,
        "pictures": [True] * 6,
        "smallest": 16,
        "rows": 3,  # two of the table, one word that differs
        "asked": 0,
    }
