"""Every command that README and docs show is run, as it stands, in the order of its page.

In a folder with stand-ins for the data sets, the photos and the runs that a page names. Words that
make it short are added (`SHORTER`); the launcher is `Ranks`, which starts a rank in 0.1 s. What
cannot be run here is in `NOT_RUN`, with the reason.
"""

import argparse
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

import firecaffe
from firecaffe.api import cluster_check, twins
from firecaffe.cli import main, start_training
from firecaffe.cluster import launcher
from firecaffe.cluster.handover import LAUNCHED
from firecaffe.cluster.hosts import Hosts
from firecaffe.data.published_formats import open_cifar10
from firecaffe.runs.environment import cpu_name
from tests.cli.shown_commands import GROUPS, NOT_RUN, PREPARED, ROOT, SHORT, Shown, shown, snippets
from tests.typed import python
from tests.world import Ranks

CIFAR10_IMAGES = 16
ALL = [found for pages in GROUPS.values() for page in pages for found in shown(page)]
BENCHMARKS = sorted(
    {
        found[1]
        for page in [*ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("docs/**/*.md")]
        for found in re.finditer(r"python -m (benchmarks\.[^\n`>|]+)", page.read_text("utf-8"))
    }
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home with little Fashion-MNIST and CIFAR-10."""
    home = tmp_path_factory.mktemp("data")
    fashion, cifar10 = home / "fashion-mnist", home / "cifar10"
    fashion.mkdir()
    cifar10.mkdir()
    for part, count in (("train", 1024), ("t10k", 16)):
        images = bytes(range(256)) * 4 * count
        labels = bytes(i % 10 for i in range(count))
        sizes = [count, 28, 28]
        for kind, shape, content in (
            ("images-idx3", sizes, images[: count * 28 * 28]),
            ("labels-idx1", sizes[:1], labels),
        ):
            head = [0x800 + len(shape), *shape]
            header = b"".join(number.to_bytes(4, "big") for number in head)
            (fashion / f"{part}-{kind}-ubyte").write_bytes(header + content)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (cifar10 / f"{name}.bin").write_bytes(bytes(3073 * CIFAR10_IMAGES))
    return home


@pytest.fixture
def here(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> Path:
    """A folder with what the pages name; commands are run there."""
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for folder in ("photos", "imagenet"):
        for part in ("train", "test"):
            for kind in ("dress", "shirt"):
                (tmp_path / folder / part / kind).mkdir(parents=True)
                for i in range(8):
                    noise = np.random.default_rng(i).integers(0, 256, (48, 64, 3), np.uint8)
                    Image.fromarray(noise).save(tmp_path / folder / part / kind / f"{i}.jpg")
    recipe = (ROOT / "recipes" / "lenet_fashion.toml").read_text("utf-8")
    (tmp_path / "RECIPE.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIRECAFFE_DATA", str(data))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(open_cifar10, "__defaults__", (CIFAR10_IMAGES,))

    def launch(arguments: list[str], hosts: Hosts, *_: object, **__: object) -> list[Path]:
        ranks.run(hosts.nproc_per_node, _run_rank, arguments, tmp_path, data)
        return []

    def launch_on(hosts: Hosts, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        count = hosts.nproc_per_node
        return ranks.run(count, _call_in_rank, function, arguments, tmp_path, data)[0]

    for module in (launcher, start_training, twins):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(cluster_check, "launch_on", launch_on)
    return tmp_path


def _run_rank(arguments: list[str], folder: Path, data: Path) -> None:
    assert _call_in_rank(main, [arguments], folder, data) == 0, arguments


def _call_in_rank(
    function: Callable[..., Any], arguments: Sequence[Any], folder: Path, data: Path
) -> Any:
    os.chdir(folder)
    os.environ["FIRECAFFE_DATA"] = str(data)
    os.environ[LAUNCHED] = str(os.getppid())  # by ours, not by torchrun
    open_cifar10.__defaults__ = (CIFAR10_IMAGES,)
    return function(*arguments)


def _run(command: str, exit_codes: Sequence[int] = (0,)) -> None:
    """As the shell would split it."""
    split = ["bash", "-c", f"printf '%s\\0' {command.partition(' ')[2]}"]
    words = subprocess.run(split, capture_output=True, text=True, check=True).stdout
    code = main(words.split("\0")[:-1])
    assert code in exit_codes, f"{command}: exit code {code}"


def _run_all(commands: Iterable[Shown]) -> None:
    for found in commands:
        if found.text.startswith("firecaffe ") and not found.reason_not_run:
            _run(found.shortened, found.exit_codes)


def _new(commands: Iterable[Shown]) -> list[Shown]:
    """Without those that were shown before: a page may repeat what another one makes."""
    first: dict[str, Shown] = {}
    for found in commands:
        first.setdefault(found.text, found)
    return list(first.values())


@pytest.mark.parametrize("group", GROUPS)
def test_every_shown_command_is_run(group: str, here: Path) -> None:
    for command in PREPARED.get(group, ()):
        _run(command)
    pages = [found for page in GROUPS[group] for found in shown(page)]
    _run_all(found for found in _new(pages) if not found.is_slow)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_long_command_is_run(group: str, here: Path) -> None:
    pages = [found for page in GROUPS[group] for found in shown(page)]
    makes = ("firecaffe pack", "firecaffe check")  # what later ones read
    _run_all(found for found in pages if found.is_slow or found.text.startswith(makes))


def test_every_shown_command_is_run_or_has_a_reason() -> None:
    programs = {found.text.split()[0] for found in ALL}
    assert "firecaffe" in programs
    open_commands = [
        found
        for found in ALL
        if not found.text.startswith(("firecaffe ", "python -m benchmarks."))
        and not found.reason_not_run
    ]
    assert open_commands == []
    for begin in NOT_RUN:
        assert any(found.text.startswith(begin) for found in ALL), f"no page shows {begin!r}"
    assert not [found for found in ALL if "…" in found.text and not found.reason_not_run]


class ParsedError(Exception):
    """A program has understood its words."""


@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_benchmark_understands_its_shown_words(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run: it takes minutes, and some need root."""
    parse = argparse.ArgumentParser.parse_known_args

    def stop(self: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        _, unknown = parse(self, *arguments)
        assert unknown == []
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    module, *words = command.split()
    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.delitem(sys.modules, module, raising=False)  # an import by another test
    with pytest.raises(ParsedError):
        runpy.run_module(module, run_name="__main__")


def test_the_demo_says_what_its_digest_depends_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `make demo` types, beside the data's download."""
    assert "firecaffe demo recipes/nin_small.toml\n" in (ROOT / "Makefile").read_text("utf-8")
    monkeypatch.setattr("firecaffe.cli.same_bits.get_data", lambda name: here)
    _run(f"firecaffe demo recipes/nin_small.toml {SHORT}")
    said = capsys.readouterr().out
    assert cpu_name() in said
    assert torch.__version__ in said
    assert "identical in all 2 runs" in said


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


PLANS = [
    found
    for found in _new(ALL)
    if found.text.startswith("firecaffe plan") and len(found.output) > 5 and not found.is_slow
]


@pytest.mark.parametrize("found", PLANS, ids=lambda found: found.page)
def test_the_plan_that_a_page_shows_is_what_plan_says(
    found: Shown, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(found.text)
    said = _numbers(capsys.readouterr().out)
    assert _numbers("\n".join(found.output)) <= said


def test_every_whole_snippet_of_python_is_run(here: Path, ranks: Ranks) -> None:
    """Of the README; those of docs: tests/cli/test_scripts_page.py."""
    whole = snippets("README.md")
    scripts = [code for code in whole if "workers=2" in code]
    assert len(scripts) >= 1
    assert len(whole) >= 2
    for code in scripts:
        (here / "script.py").write_text(code)
        done = python(here / "script.py", cwd=here)
        assert done.returncode == 0, done.stderr
    ranks.run(1, _run_snippets, [code for code in whole if code not in scripts], here)


def _run_snippets(snippets: list[str], folder: Path) -> None:
    """Each with the names that its page has talked of."""
    os.chdir(folder)
    for code in snippets:
        exec(code, {"firecaffe": firecaffe, "model": torch.nn.Linear(4, 2)})
