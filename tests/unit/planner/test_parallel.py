"""What each layer would send, by each way, AlexNet's published sizes. docs/explanation/splitting.md
has rows of the tables that the commands print.
"""

import json
import re
import tomllib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from firecaffe.api.network_profile import render_parallel
from firecaffe.api.plan_layouts import Parallel
from firecaffe.cli import main
from firecaffe.models import ModelConfig
from firecaffe.models.network import with_outline
from firecaffe.parallel.config import ONE_WEIRD_TRICK, ParallelConfig, check_parallel
from firecaffe.parallel.cut import ROWS
from firecaffe.parallel.split_kinds import SPLITS
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecasts
from firecaffe.planner.layer_traffic import WORDS, LayerVolumes, Volumes, layers_on, volumes_of
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.split_plans import WAYS
from firecaffe.planner.workload import images_of, input_of
from firecaffe.training.parallel.split_network import chosen_layers
from tests.kit.compared_runs import printed

PLACE = "tests.unit.planner.test_parallel"
SHAPE = (1, 8, 8)
PAGE = (Path(__file__).parents[3] / "docs/explanation/splitting.md").read_text()


class Mixed(nn.Module):
    """A convolution that is called twice, one with groups, a frozen one, tied weights, a
    normalization, one that is never called, and a parameter of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.groups = nn.Conv2d(8, 8, 3, groups=4)
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(requires_grad=False)
        self.tied = nn.Linear(8, 8)
        self.twin = nn.Linear(8, 8)
        self.twin.weight = self.tied.weight
        self.unused = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.again(self.again(self.first(x))))
        x = self.frozen(self.groups(x)).mean((2, 3))
        out: Tensor = self.twin(self.tied(x)) * self.gain.sum()
        return out


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Packs(nn.Module):
    def forward(self, x: Tensor) -> PackedSequence:
        return pack_padded_sequence(x[:, 0], x[:, 0, :, 0].count_nonzero(1), batch_first=True)


def found(workers: int) -> dict[str, LayerVolumes]:
    volumes = volumes_of(ModelConfig(f"{PLACE}:Mixed"), images_of(SHAPE), 10, workers)
    return {each.name: each for each in volumes.layers}


def test_words_are_those_of_split() -> None:
    """But rows, for they take no weights from a worker, and what they send depends on images."""
    assert {(word, kind) for kind, words in WORDS.items() for word in words} == {
        (word, kind) for word, kinds in SPLITS.items() for kind in kinds if word != ROWS
    }


def test_layers_by_hand() -> None:
    """In a batch of 10, 4 workers: 3/4 of the numbers in a gathering, twice that in a sum."""
    layers = found(4)
    assert [*layers] == ["", "first", "again", "norm", "groups", "tied", "twin", "unused"]
    image, inner = 8 * 64, 8 * 36
    own = {name: layers[name].weights for name in ("first", "tied", "twin", "unused")}
    assert own == {"first": 8 * 9 + 8, "tied": 64 + 8, "twin": 8, "unused": 42}
    assert layers["first"].by_data == 2 * 3 / 4 * 80
    # One input channel cannot be cut into 4; nobody wants the gradient of the images.
    assert layers["first"].by_model == {"filters": 10 * 3 / 4 * image}
    assert layers["first"].most_samples == 0
    both = 10 * 3 / 4 * (2 * image + image) * 2
    assert layers["again"].by_model == {"filters": both, "channels": both}
    assert layers["norm"].by_model == {"filters": 10 * 3 / 4 * 2 * image}
    assert layers["groups"].by_model == dict.fromkeys(
        ("filters", "channels"), 10 * 3 / 4 * (image + inner)
    )
    for name in ("", "tied", "twin", "unused"):
        layer = layers[name]
        assert (layer.by_model, layer.cheapest, layer.most_samples) == ({}, "data", None)
    network = Mixed()
    layers_on(network, torch.zeros(2, *SHAPE))
    assert not any(part._forward_hooks for part in network.modules())
    # With more workers than there are channels, or groups of them, nothing is split.
    assert found(8)["groups"].by_model == found(9)["again"].by_model == {}
    assert set(found(8)["again"].by_model) == {"filters", "channels"}


def alexnet(batch_size: int, workers: int) -> Volumes:
    config, images = ModelConfig("alexnet"), images_of((3, 227, 227))
    return volumes_of(config, images, batch_size, workers)


def test_alexnet_is_krizhevskys() -> None:
    """Convolutions by data and fully connected layers in parts; their published sizes."""
    volumes = alexnet(128, 8)
    by_name = {each.name: each for each in volumes.layers}
    dense = [by_name[f"classifier.{n}"] for n in (0, 3, 6)]
    assert [round(each.weights / 1e6, 1) for each in dense] == [37.8, 16.8, 4.1]
    assert sum(each.weights for each in volumes.layers) == 60_965_224
    assert [each.inputs for each in dense] == [9216, 4096, 4096]
    cheapest = {each.kind: set[str]() for each in volumes.layers}
    for each in volumes.layers:
        cheapest[each.kind].add(each.cheapest)
    assert cheapest == {"Conv2d": {"data"}, "Linear": {"inputs", "neurons"}}
    assert volumes.bytes_by_data == 4 * 2 * 7 / 8 * 60_965_224
    assert volumes.bytes_by_layer < volumes.bytes_by_model < volumes.bytes_by_data
    conv = sum(each.weights for each in volumes.layers if each.kind == "Conv2d")
    fc = 128 * (9216 + 2 * 4096 + 3 * 4096 + 4096 + 2 * 1000)
    assert volumes.bytes_by_layer == 4 * 7 / 8 * (2 * conv + fc)


def test_the_batch_up_to_which_a_split_sends_less() -> None:
    """At it the split is taken, and one sample further it is not."""

    def last(batch_size: int) -> LayerVolumes:
        return {layer.name: layer for layer in alexnet(batch_size, 8).layers}["classifier.6"]

    most = last(1).most_samples
    assert most is not None
    assert (last(most).cheapest, last(most + 1).cheapest) == ("inputs", "data")


def split_lines(parts: Iterable[object]) -> list[list[str]]:
    """The cells of each printed line."""
    return [re.split(r"\s{2,}", line.strip()) for line in printed(parts).splitlines()]


def test_the_page_shows_what_the_command_does() -> None:
    lines = split_lines([render_parallel(alexnet(128, 8))])
    shown = {cells[0]: [cells[2], *cells[4:]] for cells in lines if len(cells) == 12}
    rows = (line.split(" | ") for line in PAGE.splitlines())
    told = {
        row[0].strip("| `"): [each.strip(" |") for each in row[1:]]
        for row in rows
        if re.match(r"\| `(features|classifier)", row[0])
    }
    assert len(shown) == 1 + 8
    assert len(told) == 3
    assert {name: shown[name] for name in told} == told

    for name in ("alexnet", "vgg16", "googlenet"):
        model = ModelConfig(name)
        volumes = volumes_of(model, images_of(input_of(model)), 128, 8)
        for total in (volumes.bytes_by_data, volumes.bytes_by_model, volumes.bytes_by_layer):
            assert re.search(rf" {total / 1e6:,.1f}\b", PAGE), (name, total)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "lenet", "--batch-size", "64", "--parallel"]
    assert main([*words, "--workers", "4", "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert profile["workers"] == 4
    assert [layer["cheapest"] for layer in profile["layers"]] == ["data", "data", "inputs", "data"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "batch 64 over 8 workers" in out
    assert f"all layers by data: {4 * 2 * 7 / 8 * 431_080 / 1e6:.1f} MB" in out
    nothing = ["profile", f"{PLACE}:Nothing", "--input", "1x8x8"]
    for wrong, said in (
        (["profile", "lenet", "--parallel", "--workers", "0"], "--workers is 0"),
        (["profile", "lenet", "--workers", "4"], "--workers says over how many --parallel counts"),
        ([*nothing, "--parallel"], "has no weights"),
        (["profile", f"{PLACE}:Packs", "--input", "1x8x8"], "does not take zeros of"),
    ):
        assert main(wrong) == 2
        assert said in capsys.readouterr().err
    assert main(nothing) == 0


def planned(model: str, ways: list[str], exchanges: list[str] | None = None) -> Parallel:
    config, cluster = ModelConfig(model), load_cluster("ethernet-10g")
    work = workload_of_model(config, None, 256, 8)
    return Parallel(config, work, cluster, forecasts(work, cluster, [4], exchanges), ways)


def test_the_page_shows_what_plan_does() -> None:
    lines = split_lines(planned("alexnet", [*WAYS]).parts())
    ways = [f"| {' | '.join(cells[1:])} |" for cells in lines if cells[0] == "4"]
    assert len(ways) == len(WAYS)
    after = PAGE.partition("## Planning a split")[2].partition("\n## ")[0].splitlines()
    assert [line for line in after if line.startswith("|")][2:] == ways


def test_a_recipe_takes_what_the_command_says_of_it() -> None:
    found = planned("alexnet", ["same_samples", "one_weird_trick"], ["ring"])
    lines = [line for line in found.lines() if "parallel.model" in line]
    for plan, line in zip(found.plans, lines, strict=True):
        words = line.partition(": ")[2].replace(", parallel.", "\nparallel.")
        recipe = ParallelConfig(**tomllib.loads(words)["parallel"])
        check_parallel(recipe)
        assert recipe.model == plan.model
        assert (recipe.scheme == ONE_WEIRD_TRICK) == (plan.name == ONE_WEIRD_TRICK)
        chosen = partial(chosen_layers, words=recipe)
        assert with_outline(ModelConfig("alexnet"), None, None, chosen) == recipe.split
