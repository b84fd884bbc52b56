"""Readers of a whole run: what loads its network, and what computes it again."""

from pathlib import Path

from torch import nn

import firecaffe
from benchmarks.faults.fuzzed.reader import Reader
from benchmarks.faults.fuzzed.records import digest_anew
from firecaffe.cluster.world import join
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.schema import parse_json
from firecaffe.synchrony.log import EVENTS, Lines
from firecaffe.training.load import load_run
from firecaffe.training.verification import replay


def make_run(folder: Path) -> None:
    """Three steps with a server and a simulated clock, the first of them synchronous."""
    firecaffe.train(
        firecaffe.Recipe(
            model=firecaffe.ModelConfig("lenet"),
            data=firecaffe.DataConfig("generated"),
            train=firecaffe.TrainConfig(32, 8, steps=3, eval_batch_size=1000),
            run=firecaffe.RunConfig(folder=str(folder / "run"), tensorboard=False),
            synchrony=firecaffe.SynchronyConfig(
                "stale", clock="simulated", learners=3, speeds="one_slow", warm_steps=1
            ),
        )
    )
    for path in (folder / "run").rglob("*"):  # which neither of them reads
        if path.suffix == ".jsonl" and path.name != EVENTS:
            path.unlink()


def load(folder: Path) -> nn.Module:
    return load_run(folder / "run").model


def check_anew(folder: Path) -> None:
    """As a stranger would, so that the damage gets behind the checks of lines."""
    path, made = folder / "run" / EVENTS, Lines()
    if path.is_symlink() or not path.is_file():
        return
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            row = parse_json(line)
            row.pop("check", None)
            lines.append(made.line(row))
        except (ValueError, AttributeError, RecursionError):
            lines.append(line)
    path.write_bytes(b"".join(lines))


def compute_again(folder: Path) -> None:
    run = folder / "run"
    with join("cpu", 60.0, 60.0) as world:
        replay(run, recipe_of_run(run), world)


READERS = {
    "load": Reader(make_run, load, digest_anew),
    "replay": Reader(make_run, compute_again, check_anew, damaged="run/*"),
}
