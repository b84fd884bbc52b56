"""Ranks that are not alike: named before training starts, or written into the record."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch

import firecaffe
from firecaffe import ExchangeConfig, ParallelConfig, Recipe, RunConfig, TrainConfig
from firecaffe.cluster.agree import agree
from firecaffe.cluster.world import join
from firecaffe.errors import AgreementError, PeerLostError
from firecaffe.runs.run_folder import read_run_file
from tests.ranks.networks import Everything, small_data
from tests.ranks.test_layouts import Net
from tests.world import RankError, Ranks

RECIPE = Recipe(
    train=TrainConfig(global_batch_size=12, micro_batch_size=2, steps=3),
    exchange=ExchangeConfig(timeout_s=300),
)


def fit(folder: str, odd_rank: int, what: str) -> str:
    """Trains, with one rank that differs; returns its error, where there is one."""
    is_odd = int(os.environ["RANK"]) == odd_rank
    recipe = dataclasses.replace(RECIPE, run=RunConfig(folder=folder, tensorboard=False))
    samples = 60
    if is_odd and what == "recipe":
        train = dataclasses.replace(recipe.train, seed=5)
        recipe = dataclasses.replace(recipe, train=train)
    if is_odd and what == "data":
        samples = 61
    if is_odd and what == "instructions":
        # Read when torch first computes something, which this process has not done yet.
        os.environ["ATEN_CPU_CAPABILITY"] = "default"
        os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    made = {"model": BiggerHead, "buffer": LongerMask}.get(what if is_odd else "", Everything)

    def network() -> torch.nn.Module:  # of one file, whatever it makes
        return made()

    try:
        firecaffe.train(recipe, network, small_data(samples), small_data(20, 1))
    except AgreementError as error:
        return str(error)
    return ""


class BiggerHead(Everything):
    """Another network under the same name."""

    __qualname__ = "Everything"

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 5)
        self.rare = torch.nn.Parameter(torch.zeros(5))
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)


class LongerMask(Everything):
    """The same parameters, and a buffer that is in no state_dict."""

    __qualname__ = "Everything"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("recipe", "train.seed"),
        ("data", "the training data"),
        ("model", "the model"),
        ("buffer", "the model"),
    ],
)
def test_every_rank_names_the_one_that_differs(
    ranks: Ranks, what: str, words: str, tmp_path: Path
) -> None:
    for error in ranks.run(3, fit, str(tmp_path / "run"), 1, what):
        assert error.startswith(f"rank 1 differs from the others in {words}: ")
    assert not (tmp_path / "run").exists()


def test_another_kind_of_processor_is_written_into_the_record(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, fit, str(tmp_path / "run"), 1, "instructions") == [""] * 3
    record = read_run_file(tmp_path / "run", "result.json")
    assert record["drifted_ranks"] == [1]
    doubts = record["identity_doubts"]
    assert doubts == [
        "rank 1 made other initial weights from the same seed; rank 0's were taken",
        "rank 1 computes other bits than most ranks on the same micro-batch",
    ]


ROWS = {
    "split": ParallelConfig(1, 2, {"classifier.0": "neurons"}),
    "one weird trick": ParallelConfig(1, 2, scheme="one_weird_trick"),
    "stages": ParallelConfig(1, stages=["features.4"]),
}
"""Of two workers, which hold one model together."""


class Wider(Net):
    """Another network under the same name."""

    __qualname__ = "Net"

    def __init__(self) -> None:
        super().__init__()
        self.classifier.append(torch.nn.Linear(4, 4))


def fit_in_row(name: str, folder: str, what: str) -> str:
    """Trains, with a rank 1 that differs; returns its error, if there is one."""
    is_odd = os.environ["RANK"] == "1"
    if is_odd and what == "instructions":
        os.environ["ATEN_CPU_CAPABILITY"] = "default"
        os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    made = Wider if is_odd and what == "model" else Net

    def network() -> torch.nn.Module:
        return made()

    run = RunConfig(folder=folder, tensorboard=False)
    recipe = dataclasses.replace(RECIPE, parallel=ROWS[name], run=run)
    try:
        firecaffe.train(recipe, network, small_data(60), small_data(20, 1))
    except AgreementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ROWS)
def test_ranks_of_a_row_are_compared(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Also those that have nothing in common: a stage is on one rank alone."""
    for error in ranks.run(2, fit_in_row, name, str(tmp_path / "other"), "model"):
        assert error.startswith("rank 1 differs from the others in the model: ")
    found = ranks.run(2, fit_in_row, name, str(tmp_path / "run"), "instructions")
    assert found == [""] * 2
    assert read_run_file(tmp_path / "run", "result.json")["identity_doubts"] == [
        "rank 1 made other initial weights from the same seed; rank 0's were taken",
        "rank 1 computes other bits than most ranks on the same micro-batch",
    ]


class DiesInThirdForward(Everything):
    """A network whose rank 1 is killed while the others are on their way into the exchange."""

    forwards = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 6 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)


def lose_a_rank(folder: str) -> str:
    recipe = dataclasses.replace(RECIPE, run=RunConfig(folder=folder, tensorboard=False))
    try:
        firecaffe.train(recipe, DiesInThirdForward, small_data(60), small_data(20, 1))
    except PeerLostError as error:
        return str(error)
    return ""


def test_survivors_of_a_killed_rank_say_so(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1: its process ended with -9\nrank 0: returned$"):
        ranks.run(2, lose_a_rank, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "result.json").exists()


def agree_on(facts: list[str]) -> str:
    with join("cpu") as world:
        try:
            agree(world, {"the color": facts[world.rank]})
        except AgreementError as error:
            return str(error)
    return ""


def test_agreement_names_the_minority(ranks: Ranks) -> None:
    assert ranks.run(3, agree_on, ["red", "red", "red"]) == [""] * 3
    for error in ranks.run(3, agree_on, ["blue", "red", "red"]):
        assert error.startswith(
            "rank 0 differs from the others in the color: blue on rank 0, red on rank 1"
        )
