"""The report as a reader has it: one file, and the same bytes again."""

import base64
import re
from pathlib import Path

import pytest

import firecaffe.cli
from tests.kit.compared_runs import compared_runs, train, with_metrics
from tests.typed import refused


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return compared_runs(tmp_path_factory.mktemp("runs"))


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


def test_a_page_is_written_under_a_page_s_name(runs: list[str], tmp_path: Path) -> None:
    words = ["compare", "--html", str(tmp_path / "page.txt"), *runs]
    assert firecaffe.cli.main(words) == 2
    assert not list(tmp_path.iterdir())


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


def test_what_cannot_be(runs: list[str]) -> None:
    page = ["--by", "recipe", "--html", "nowhere/x.html"]
    assert "--html nowhere/x.html: there is no folder nowhere" in refused(
        8, "compare", *page, *runs
    )
    assert "is given 2 times; a run counts once" in refused(2, "compare", *runs, runs[0])
