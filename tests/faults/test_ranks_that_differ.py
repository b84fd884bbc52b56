"""Ranks that are not alike: named before training starts, or written into the record."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import firecaffe
from benchmarks.kit.small_run import command, steps_of
from firecaffe import ExchangeConfig, ParallelConfig, Recipe, TrainConfig
from firecaffe.cluster.agree import agree
from firecaffe.cluster.secret import SECRET
from firecaffe.cluster.world import World, join
from firecaffe.data.batches import TrainBatches
from firecaffe.errors import AgreementError, PreemptedError
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.plugins import Plugin
from tests.faults.runs import meeting, write_recipe
from tests.kit.training import before_each
from tests.kit.worlds import Training, changed
from tests.loopback import free_port
from tests.ranks.networks import Everything, small_data
from tests.ranks.test_layouts import Net
from tests.typed import Typed, python
from tests.unit.cluster.watches import until
from tests.world import Ranks

RECIPE = Recipe(
    train=TrainConfig(global_batch_size=12, micro_batch_size=2, steps=3),
    exchange=ExchangeConfig(timeout_s=300),
)


def bigger(net: Any) -> None:
    net.head = torch.nn.Linear(6, 5)
    net.rare = torch.nn.Parameter(torch.zeros(5))
    net.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)


def with_longer_mask(net: Any) -> None:
    """The same parameters, and a buffer that is in no state_dict."""
    net.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)


def wider(net: Any) -> None:
    net.classifier.append(torch.nn.Linear(4, 4))


ROWS = {
    "split": ParallelConfig(1, 2, {"classifier.0": "neurons"}),
    "one weird trick": ParallelConfig(1, 2, scheme="one_weird_trick"),
    "stages": ParallelConfig(1, stages=["features.4"]),
}
"""Of two workers, which hold one model together."""


def fit(folder: Path, what: str, row: str = "") -> str:
    """Trains, with a rank 1 that differs; returns its error, if there is one."""
    is_odd = os.environ["RANK"] == "1"
    if is_odd and what == "instructions":
        # Read when torch first computes something, which this process has not done yet.
        os.environ["ATEN_CPU_CAPABILITY"] = "default"
        os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    recipe = changed(RECIPE, train={"seed": 5}) if is_odd and what == "recipe" else RECIPE
    change = {"model": wider if row else bigger, "buffer": with_longer_mask}.get(what)

    def network() -> torch.nn.Module:  # of one name, whatever it makes
        net = Net() if row else Everything()
        if is_odd and change is not None:
            change(net)
        return net

    parallel = ROWS[row] if row else ParallelConfig()
    training = Training(network, 61 if is_odd and what == "data" else 60)
    return training.error(changed(recipe, parallel=parallel), folder)


DIFFERS = "AgreementError: rank 1 differs from the others in "
DOUBTS = [
    "rank 1 made other initial weights from the same seed; rank 0's were taken",
    "rank 1 computes other bits than most ranks on the same micro-batch",
]


NAMES = {"recipe": "train.seed", "data": "the training data", "model": "the model"}
NAMES |= {"buffer": "the model"}


@pytest.mark.parametrize("what", NAMES)
def test_every_rank_names_the_one_that_differs(ranks: Ranks, what: str, tmp_path: Path) -> None:
    for error in ranks.shared(3, fit, tmp_path / "run", what):
        assert error.startswith(f"{DIFFERS}{NAMES[what]}: ")
    assert not (tmp_path / "run").exists()


def test_another_kind_of_processor_is_written_into_the_record(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, fit, tmp_path / "run", "instructions") == [""] * 3
    record = read_run_file(tmp_path / "run", "result.json")
    assert (record["drifted_ranks"], record["identity_doubts"]) == ([1], DOUBTS)


@pytest.mark.parametrize("row", ROWS)
def test_ranks_of_a_row_are_compared(ranks: Ranks, row: str, tmp_path: Path) -> None:
    """Also those that have nothing in common: a stage is on one rank alone."""
    for error in ranks.run(2, fit, tmp_path / "other", "model", row):
        assert error.startswith(f"{DIFFERS}the model: ")
    assert ranks.run(2, fit, tmp_path / "run", "instructions", row) == [""] * 2
    assert read_run_file(tmp_path / "run", "result.json")["identity_doubts"] == DOUBTS


def spoil(step: int, _: int) -> None:
    """In the last step a parameter of this rank changes."""
    for own in gc.get_objects() if step == 2 else ():
        if isinstance(own, torch.nn.Parameter) and own.shape[1:] == (63,):
            own.data += 1e-3


class Spoils(Plugin):
    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        return before_each(batches, spoil) if world.rank == world.world_size - 1 else batches


def fit_spoiled(folder: Path) -> list[int]:
    layout = ParallelConfig(2, 2, {"classifier.0": "neurons"})
    recipe = changed(RECIPE, parallel=layout, run={"folder": str(folder)})
    sets = small_data(60), small_data(30, 1)
    return firecaffe.train(recipe, Net, *sets, plugins=[Spoils()]).drifted_ranks


def test_a_rank_with_other_weights_in_its_column_is_in_the_record(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(4, fit_spoiled, tmp_path / "run") == [[3]] * 4


def agree_on(facts: list[str]) -> str:
    with join("cpu") as world:
        try:
            agree(world, {"the color": facts[world.rank]})
        except AgreementError as error:
            return str(error)
    return ""


def test_agreement_names_the_minority(ranks: Ranks) -> None:
    assert ranks.shared(3, agree_on, ["red", "red", "red"]) == [""] * 3
    for error in ranks.shared(3, agree_on, ["blue", "red", "red"]):
        assert error.startswith("rank 0 differs from the others in the color: blue on rank 0")


@pytest.mark.slow
def test_a_host_that_comes_with_another_recipe_is_refused_alone(tmp_path: Path) -> None:
    """The run goes on without it, before it ends."""
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    hosts = ("--nnodes", "1:2", *meeting(free_port(), "late")[2:])
    words = command(recipe, run, 1, "--train.steps", "100000", *hosts)[1:]
    secret = {SECRET: "that of these two hosts"}
    with Typed(*words, environment=secret) as first:
        until(lambda: len(steps_of(run)) > 3)
        late = python(*words, "--train.seed", "5", environment=secret)
        assert late.returncode == AgreementError.exit_code, late.stderr
        assert "train.seed" in late.stderr
        saved = [path.name.removeprefix("step-") for path in run.glob("checkpoints/step-*")]
        assert max(steps_of(run)) > max(map(int, saved)), "a supervisor may restart it by now"
        os.kill(first.pid, signal.SIGTERM)
        _, errors = first.communicate()
        assert first.wait() == PreemptedError.exit_code, errors
    assert "train.seed" in errors
