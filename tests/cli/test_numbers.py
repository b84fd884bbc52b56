"""Every numeric option with values that cannot be: accepted, or one line, and no rank started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firecaffe.api.answer import PLAIN_SIGNS
from firecaffe.cli import COMMANDS, function_of, main
from firecaffe.cli.bench import PARTS
from firecaffe.data.generated import generate
from tests.typed import refused

HUGE = "99999999999999999999"
VALUES = (HUGE, f"-{HUGE}", "-1", "0", "nan", "1e300")
RECIPE = """
model.name = "lenet"
data.name = "generated"
[train]
global_batch_size = 8
micro_batch_size = 2
steps = 400
"""
LINES = {
    "train RECIPE": ["--nproc-per-node", "--master-port", "--nnodes", "--max-restarts"],
    "verify RECIPE": ["--nproc-per-node", "--nproc-per-node=1,", "--steps"],
    "tune RECIPE": ["--global-batch-size"],
    "tune RECIPE --global-batch-size 16": [
        "--nproc-per-node",
        "--budget",
        "--seeds",
        "--band",
        "--side-by-side",
    ],
    "plan RECIPE": ["--workers"],
    "plan RECIPE --workers 1 --epochs 8=3": ["--noise-scale"],
    "plan --model lenet": ["--workers", "--global-batch-size", "--micro-batch-size"],
    "plan --model lenet --device a100": ["--per-node", "--links", "--workers"],
    "check": ["--nproc-per-node", "--master-port", "--nnodes"],
    "profile lenet": ["--batch-size", "--input=1x28x", "--input"],
    "profile lenet --parallel": ["--batch-size", "--workers"],
    "schedule tree": [""],
    "schedule tree 8": ["--ranks-per-node", "--elements", "--micro-batches"],
    "bench exchange": ["--nproc-per-node", "-b", "-e", "-f", "-n", "--link", "--master-port"],
    "bench step RECIPE": ["--sizes", "--seconds"],
    "bench data FOLDER": ["--model-rate", "--images", "--threads", "--resize", "--crop"],
    "pack FOLDER DEST": ["--resize", "--quality", "--shard-size", "--threads", "--hold-out"],
    "compare FOLDER --by recipe": ["--target", "--band"],
    "evaluate FOLDER": ["--nproc-per-node"],
    "predict FOLDER": ["--top"],
    "compress RECIPE": ["--nproc-per-node"],
}


@pytest.mark.parametrize(
    "command", [*sorted({*COMMANDS} - {"bench"}), *(f"bench_{part}" for part in PARTS)]
)
def test_every_numeric_option_is_among_them(command: str) -> None:
    typed = command.replace("_", " ")
    swept = {each for line in LINES if line.startswith(typed) for each in LINES[line]}
    for action in function_of("make_parser", command)().own:
        if getattr(action, "_typehint", None) in (int, float) and "." not in action.dest:
            assert swept & {*action.option_strings} or not action.option_strings, action.dest


class Started(BaseException):
    """Ranks, or a training, would have been started."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr("firecaffe.cluster.agent.FaultAgent.run", refuse)
    monkeypatch.setattr("firecaffe.tuning.batch_search.run_trials", refuse)
    # First where it is imported by name, which must not happen while it is replaced.
    for module in ("api.cluster_check", "api.step_rates", "measure.step_times"):
        monkeypatch.setattr(f"firecaffe.{module}.time_steps", refuse)
    monkeypatch.setattr("firecaffe.data.pack_images.Packing.run", refuse)
    monkeypatch.setattr("firecaffe.data.sources.generate", lambda: generate(0, 60, 20))


@pytest.mark.parametrize("line", LINES)
def test_no_number_ends_in_a_traceback(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("RECIPE").write_text(RECIPE)
    for option in LINES[line]:
        for value in VALUES:
            words = [option + value] if option.endswith((",", "x")) else [option, value]
            try:
                code = main([*line.split(), *filter(None, words)])
            except Started:
                capsys.readouterr()
                assert value not in ("nan", "1e300", "-1"), words
                continue
            said = capsys.readouterr().err
            assert code != 1, (words, said)
            assert said.count("firecaffe: ") == (1 if code else 0), (words, said)
            assert "Traceback" not in said, (words, said)


@pytest.mark.parametrize("line", ["check", "train RECIPE", "verify RECIPE"])
def test_ranks_are_bounded_by_memory(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("RECIPE").write_text(RECIPE.replace("size = 8", "size = 60").replace("= 2\n", "= 1\n"))
    monkeypatch.setattr("firecaffe.cluster.hosts.RANK_BYTES", 10**15)
    counts = "1,2" if line.startswith("verify") else "2"
    assert "--nproc-per-node is 2" in refused(2, *line.split(), "--nproc-per-node", counts)


def test_pictures_where_only_ascii_can_be_shown() -> None:
    pictures = [
        subprocess.run(
            [sys.executable, "-m", "firecaffe", "schedule", "tree", "8", "--draw"],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=True,
        ).stdout.decode(encoding)
        for encoding in ("ascii", "utf-8")
    ]
    assert pictures[0] == "".join(PLAIN_SIGNS.get(sign, sign) for sign in pictures[1])
    assert pictures[0] != pictures[1]
    assert "?" not in pictures[0]
