"""Layers, halos, paths and rows of images over ranks: the bits of one rank, the values of the
network that is not split, and the bytes of the formulas and of the planner.
"""

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import firecaffe
from firecaffe import DataConfig, ExchangeConfig, ModelConfig, ParallelConfig, Recipe, TrainConfig
from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.cluster.agree import digest
from firecaffe.models.googlenet import Inception
from firecaffe.models.squeezenet import Fire
from firecaffe.parallel.layer_split import Split
from firecaffe.parallel.volumes import by_paths, by_rows, gather_numbers
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.layer_traffic import layers_on, paths_on
from firecaffe.planner.recipe_layout import RecipeLayout, layout_cost
from firecaffe.planner.recipe_workload import workload_of_model
from tests.kit.worlds import changed
from tests.world import Ranks

WIDTHS = (4, 3, 6, 2, 3, 5)
Words = dict[str, str]
Case = tuple[Callable[[], nn.Module], Words, Any]
"""A network, what it is split by, and the shape of its inputs."""


def halos() -> nn.Module:
    """In four parts, the first has 1, 2, 1 and 2 channels: halos are of several parts."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), LocalResponseNorm(6, 0.5), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 11, 3), nn.LocalResponseNorm(3, 0.5), nn.Flatten(), nn.Linear(44, 5)),
    )


def paths() -> nn.Module:
    return nn.Sequential(
        *(Inception(3, WIDTHS, batch_norm=False), nn.LocalResponseNorm(5, 0.5), nn.MaxPool2d(2)),
        *(Inception(18, WIDTHS, batch_norm=True), nn.Flatten(), nn.Linear(18 * 9, 5)),
    )


def in_rows() -> nn.Module:
    """AlexNet's first layers in small: halos of pools in ceil mode, a layer between that is whole,
    a pool that makes too few rows, and a dense layer in parts.
    """
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 11, 4), nn.ReLU(), LocalResponseNorm(3, 0.5), nn.Dropout(0.2)),
        *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(4, 6, 5, padding=2, groups=2)),
        *(nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.AvgPool2d(3, 1, 1, ceil_mode=True)),
        *(nn.Conv2d(6, 8, 1), nn.Conv2d(8, 4, 3, padding=1)),
        *(nn.MaxPool2d(3, 3), nn.Flatten(), nn.Linear(4 * 2 * 2, 8), nn.ReLU()),
    )


def in_paths() -> nn.Module:
    """Between filters and neurons; one takes what another has made."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(Inception(8, WIDTHS, batch_norm=True), nn.MaxPool2d(2)),
        *(Inception(18, WIDTHS, batch_norm=False), nn.Flatten(), nn.Linear(18 * 9, 8)),
    )


def in_two() -> nn.Module:
    """The paths take what is common, and rows what paths have made."""
    return nn.Sequential(Fire(3, 4, 6), nn.ReLU(), nn.Conv2d(12, 4, 3, padding=1), nn.ReLU())


class Small(nn.Module):
    """AlexNet in small: convolutions, one with groups, paths, and fc6, fc7, fc8 with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 10, 5, stride=2), nn.BatchNorm2d(10), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(10, 8, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(8, 12, 3, padding=1, groups=4), nn.ReLU()),
        )
        self.paths = Inception(12, (4, 5, 6, 4, 4, 5), batch_norm=False)
        self.classifier = nn.Sequential(
            *(nn.Linear(19 * 25, 37), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(37, 22), nn.ReLU(inplace=True), nn.Linear(22, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.paths(self.features(x)).flatten(1))
        return y


WORDS = {
    "features.*": "filters",
    "features.4": "channels",
    "paths.*.conv": "filters",
    "classifier.*": "neurons",
    "classifier.3": "inputs",
}
ROWS = {"0": "rows", "5": "rows", "6": "rows", "10": "rows", "13": "inputs"}
PATHS = {"0": "filters", "3": "paths", "5": "paths", "7": "neurons"}
NETWORKS: dict[str, Case] = {
    "halos": (halos, {"0": "filters", "4": "filters", "7": "inputs"}, (3, 10, 10)),
    "paths": (paths, {"0": "paths", "3": "paths", "5": "inputs"}, (3, 6, 6)),
    "layers": (Small, WORDS, (3, 24, 24)),
    "in_rows": (in_rows, ROWS, (3, 71, 55)),
    "in_paths": (in_paths, PATHS, (3, 12, 12)),
    "in_two": (in_two, {"0": "paths", "2": "rows"}, (3, 7, 5)),
}


def train(name: str, is_split: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, the whole state on rank 0, and the elements that this rank holds."""
    make, words, shape = NETWORKS[name]
    torch.manual_seed(3)
    model = make().double()
    if name == "paths":  # one without weights that need a gradient, behind inputs without
        model.get_submodule("0.branch3").requires_grad_(False)
    network = firecaffe.adapt.split_layers(model, words, parts=4) if is_split else model
    try:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(5)
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(network(torch.randn(4, *shape).double()), torch.arange(4))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        held = sum(each.numel() for each in network.parameters())
        state = network.whole_state_dict() if isinstance(network, Split) else model.state_dict()
        return losses, state, held
    finally:
        del network
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("name", ["halos", "paths", "in_rows", "layers"])
def test_any_number_of_ranks_ends_in_the_same_bits(ranks: Ranks, name: str) -> None:
    [(losses, state, whole)] = ranks.shared(1, train, name, True)
    held = {1: [whole]}
    for size in (2, 4):
        by_rank = ranks.shared(size, train, name, True)
        assert all(of_rank == losses for of_rank, _, _ in by_rank)
        assert list(by_rank[0][1]) == list(state)
        assert not any(of_rank for _, of_rank, _ in by_rank[1:])
        assert digest(sorted(by_rank[0][1].items())) == digest(sorted(state.items())), size
        held[size] = [of_rank for _, _, of_rank in by_rank]
    expected_losses, expected, _ = train(name, False)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(state, dict(expected), rtol=1e-9, atol=1e-11)
    if name == "layers":
        assert all(of_rank < 1.2 * whole / size for size in (2, 4) for of_rank in held[size])
    if name == "paths":
        bias = 5
        assert sum(held[2]) - bias == sum(held[4]) - 3 * bias == whole
        assert max(held[4]) < max(held[2]) < whole


def load(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was saved of two parts on one rank, in two on two: by default as many as ranks."""
    split = firecaffe.adapt.split_layers(nn.Sequential(Fire(6, 3, 5)), {"0": "paths"})
    try:
        split.load_whole_state_dict(state)
        return split.whole_state_dict()
    finally:
        del split
        dist.destroy_process_group()


def test_tensors_that_some_ranks_have_are_saved_and_loaded(ranks: Ranks) -> None:
    state = nn.Sequential(Fire(6, 3, 5)).state_dict()
    loaded, of_second = ranks.shared(2, load, state)
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert not of_second


def layers_of(*layers: nn.Module) -> Callable[[], nn.Module]:
    """A function that makes a network of them: a split takes its layers out of the network."""
    return lambda: copy.deepcopy(nn.Sequential(*layers))


PAIR = layers_of(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
INCEPTION = layers_of(Inception(8, WIDTHS, batch_norm=False))
PADDED = layers_of(nn.Conv2d(3, 4, 3, padding=1))
BY_HAND: list[Case] = [
    (PAIR, {"0": "neurons", "2": "inputs"}, (12, 16)),
    (PAIR, {"*": "neurons"}, (12, 16)),
    (layers_of(nn.Conv2d(3, 12, 1), nn.LocalResponseNorm(5)), {"0": "filters"}, (2, 3, 5, 7)),
    (INCEPTION, {"0": "paths"}, (2, 8, 5, 7)),
    (PADDED, {"0": "rows"}, (2, 3, 8, 5)),
]

# 37, 10, 11 and 6 are not divided by 4 ranks.
ALONE: list[tuple[str, nn.Module, tuple[int, ...]]] = [
    ("neurons", nn.Linear(37, 10), (3, 37)),
    ("inputs", nn.Linear(37, 10), (3, 37)),
    ("filters", nn.Conv2d(5, 6, 3), (3, 5, 7, 7)),
    ("channels", nn.Conv2d(5, 6, 3), (3, 5, 7, 7)),
    ("filters", nn.Conv2d(12, 6, 3, groups=6), (3, 12, 7, 7)),
    ("channels", nn.Conv2d(12, 6, 3, groups=6), (3, 12, 7, 7)),
    ("filters", nn.BatchNorm2d(6), (3, 6, 7, 7)),
    ("neurons", nn.BatchNorm1d(6), (3, 6)),
    ("rows", nn.Conv2d(3, 4, 5, stride=2, padding=1), (2, 3, 11, 5)),
    ("rows", nn.Conv2d(3, 2, 3, padding=2, dilation=2), (2, 3, 11, 5)),
    ("rows", nn.BatchNorm2d(3), (2, 3, 11, 5)),
]
"""A word, the layer that it splits, and the shape of its inputs."""

IN_FOUR: list[Case] = [
    *BY_HAND,
    *((layers_of(layer), {"0": word}, shape) for word, layer, shape in ALONE),
]

Bytes = list[tuple[int, int]]
"""Of forward and of backward: as a network's first layers, and as later ones."""


def sent_by(cases: list[Case], parts: int) -> list[Bytes]:
    sent = []
    dist.init_process_group("gloo")
    try:
        for make, words, shape in cases:
            torch.manual_seed(0)  # ranks draw alike, whatever these have drawn before
            split = firecaffe.adapt.split_layers(make(), words, parts=parts)
            split(torch.ones(shape))
            ends = [split.group.group.traffic.sent_bytes or 0]
            for has_gradient in (False, True):
                y = split(torch.ones(shape).requires_grad_(has_gradient))
                ends.append(split.group.group.traffic.sent_bytes or 0)
                y.sum().backward()
                ends.append(split.group.group.traffic.sent_bytes or 0)
            first, back, later, later_back = (after - before for before, after in pairwise(ends))
            sent.append([(first, back), (later, later_back)])
            del split
        return sent
    finally:
        dist.destroy_process_group()


def sent_in_four() -> list[Bytes]:
    return sent_by(IN_FOUR, 4)


@pytest.fixture(scope="module")
def in_four(ranks: Ranks) -> list[list[Bytes]]:
    return ranks.shared(4, sent_in_four)


def test_bytes_are_those_of_the_formulas(in_four: list[list[Bytes]]) -> None:
    """docs/explanation/splitting.md: a sum is 2 (K - 1) / K of the tensor, one's parts of a sum, or
    a gathering, (K - 1) / K.
    """
    pairs, alike, of_halos, of_paths, of_rows = zip(
        *(of_rank[: len(BY_HAND)] for of_rank in in_four), strict=True
    )
    batch, share = 12, 3 / 4 * 4
    assert [later for _, later in pairs] == [(2 * share * batch * 8, 2 * share * batch * 16)] * 4
    expected = share * batch * (32 + 8), share * batch * (32 + 2 * 16)
    assert [later for _, later in alike] == [expected] * 4
    # Two ranks stand at an end and send two channels, two others send four.
    channel, image = 4 * 2 * 5 * 7, 2 * 12 * 5 * 7
    gathered = 4 * gather_numbers(4, image, 12)
    ends = [(channel * n + gathered, channel * n) for n in (2, 4, 4, 2)]
    assert [first for first, _ in of_halos] == ends
    # In the mean over ranks, because the first and last send on one side. Each part sees 4 channels
    # of 12 beyond its own.
    assert sum(back for (_, back), _ in of_halos) / 4 == 4 * (3 * 4 * image / 12 / 4)
    # Of 4, 6, 3 and 5 channels, all send as much as 6.
    sample = 2 * 5 * 7
    assert of_paths == (of_paths[0],) * 4
    assert sum(of_paths[0][1]) == 4 * by_paths(4, 8 * sample, 6 * sample)
    # A row goes over a border each way. The input was whole and is to be, and so the output.
    weights, row = 4 * 3 * 9 + 4, 2 * 3 * 5
    output = gather_numbers(4, 2 * 4 * 8 * 5, 8)
    whole = gather_numbers(4, 2 * 3 * 8 * 5, 8) + output
    mean = sum(sum(later) for _, later in of_rows) / 4
    assert mean == 4 * (by_rows(4, weights, 2 * row) + whole)
    assert of_rows[0][1][0] == 4 * (row + output)


def test_bytes_of_a_layer_are_those_of_the_profile(in_four: list[list[Bytes]]) -> None:
    """The mean over ranks, for in a sum those with more of the vector send less."""
    for number, (word, layer, shape) in enumerate(ALONE, len(BY_HAND)):
        for is_later in (False, True):
            inputs = torch.ones(shape).requires_grad_(is_later)
            [planned] = layers_on(nn.Sequential(layer), inputs)
            numbers = planned.words[word](planned.sizes, 4) * shape[0] if word != "rows" else 0
            if word == "rows" and planned.images:
                numbers = planned.images.numbers(planned.sizes, shape[0], 4) or 0
                assert planned.images.numbers(planned.sizes, shape[0], 12) is None
            mean = sum(sum(of_rank[number][is_later]) for of_rank in in_four) / 4
            assert mean == pytest.approx(4 * numbers), (word, layer, is_later)


def test_paths_as_they_are_planned() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), Inception(8, WIDTHS, batch_norm=False))
    [module] = paths_on(network, torch.ones(2, 3, 5, 7))
    planned, sample = module.volumes(2, 4), 2 * 5 * 7
    assert (planned.name, planned.paths, planned.cheapest) == ("1", 4, "data")
    assert planned.by_paths == by_paths(4, 8 * sample, 6 * sample)
    assert (planned.inputs, planned.outputs) == (8 * 35, 18 * 35)
    assert module.volumes(2, 5).by_paths is None
    assert planned.by_data == 2 * 3 / 4 * sum(each.numel() for each in network[1].parameters())


PLANNED = {2: ("in_rows", "in_paths", "in_two"), 4: ("in_rows", "in_paths")}
"""By the number of parts: the first of `in_two` has two paths."""


def sent_by_networks(parts: int) -> list[Bytes]:
    cases = [NETWORKS[name] for name in PLANNED[parts]]
    return sent_by([(make, words, (2, *shape)) for make, words, shape in cases], parts)


@pytest.mark.parametrize(("workers", "parts"), [(2, 2), (2, 4), (4, 4)])
def test_what_is_planned_of_a_network_is_sent(ranks: Ranks, workers: int, parts: int) -> None:
    by_rank = ranks.shared(workers, sent_by_networks, parts)
    for number, name in enumerate(PLANNED[parts]):
        _, words, shape = NETWORKS[name]
        config = ModelConfig(f"{__name__}:{name}")
        work = workload_of_model(config, shape, 2, 2)
        layout = RecipeLayout(ParallelConfig(1, workers, words, parts), words)
        (plan,) = layout_cost(config, work, layout).plans(
            load_cluster("ethernet-10g"), workers, "tree"
        )
        mean = sum(sum(of_rank[number][0]) for of_rank in by_rank) / workers
        assert plan.step.activations_bytes == pytest.approx(mean), name
        assert plan.step.gradients_bytes == 0


LENET = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("generated"),
    train=TrainConfig(64, 4, steps=2, device="cpu", eval_batch_size=500),
    exchange=ExchangeConfig("tree", shared_memory=False, timeout_s=300),
    parallel=ParallelConfig(2, 2, {"ip1": "inputs", "ip2": "neurons"}, 4, "one_weird_trick"),
)


def test_what_one_weird_trick_sends(ranks: Ranks, tmp_path: Path) -> None:
    """The sums of 405,000 weights in their columns, of which a worker has two nodes, one of each
    worker of its row; and the activations.
    """
    recipe = changed(LENET, run={"folder": str(tmp_path / "run"), "tensorboard": False})
    sent = ranks.shared(4, firecaffe.train, recipe)[0].sent_bytes_per_step_by_rank
    forecast = json.loads((tmp_path / "run" / "forecast.json").read_text())
    mean = sum(each or 0 for each in sent) / len(sent)
    assert forecast["gradients_bytes"] + forecast["activations_bytes"] == pytest.approx(
        mean, rel=0.02
    )
    head = 3 / 2 * 4 * (405_000 + 510) / 2  # of each worker; a bias by inputs is whole
    assert forecast["gradients_bytes"] == pytest.approx(
        head + 2 * 3 / 4 * 4 * (431_080 - 405_510), rel=0.01
    )
