"""Layers, halos, paths and rows of images over ranks: the bits of one rank, the values of the
network that is not split, and the bytes of the formulas and of the planner.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

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
from firecaffe.parallel.volumes import by_paths, by_rows, gather_numbers, halo_numbers
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.layer_traffic import layers_on, paths_on
from firecaffe.planner.of_parallel import OwnLayout, own_cost
from firecaffe.planner.of_recipe import workload_of_model
from tests.kit.worlds import changed
from tests.world import Ranks

WIDTHS = (4, 3, 6, 2, 3, 5)
Words = dict[str, str]


def halos() -> nn.Module:
    """In four parts, the first has 1, 2, 1 and 2 channels: halos are of several parts."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), LocalResponseNorm(6, 0.5), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 11, 3), nn.LocalResponseNorm(3, 0.5), nn.Flatten(), nn.Linear(44, 5)),
    )


def paths() -> nn.Module:
    """The first has a path without weights that need a gradient, behind inputs without."""
    first = Inception(3, WIDTHS, batch_norm=False)
    first.branch3.requires_grad_(False)
    return nn.Sequential(
        *(first, nn.LocalResponseNorm(5, 0.5), nn.MaxPool2d(2)),
        *(Inception(18, WIDTHS, batch_norm=True), nn.Flatten(), nn.Linear(18 * 9, 5)),
    )


def rows() -> nn.Module:
    """AlexNet's first layers in small, one row a part in the end, and batch normalization."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 11, 4), nn.ReLU(), LocalResponseNorm(3, 0.5), nn.Dropout(0.2)),
        *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(4, 6, 5, padding=2, groups=2)),
        *(nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.AvgPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 4 * 3, 5)),
    )


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
TRAINED: dict[str, tuple[Callable[[], nn.Module], Words, tuple[int, ...]]] = {
    "halos": (halos, {"0": "filters", "4": "filters", "7": "inputs"}, (3, 10, 10)),
    "paths": (paths, {"0": "paths", "3": "paths", "5": "inputs"}, (3, 6, 6)),
    "rows": (rows, {"[0-9]": "rows", "11": "inputs"}, (3, 71, 55)),
    "layers": (Small, WORDS, (3, 24, 24)),
}


def train(name: str, is_split: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, the whole state on rank 0, and the elements that this rank holds."""
    make, words, shape = TRAINED[name]
    torch.manual_seed(3)
    model = make().double()
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


@pytest.mark.parametrize("name", TRAINED)
def test_any_number_of_ranks_ends_in_the_same_bits(ranks: Ranks, name: str) -> None:
    [(losses, state, whole)] = ranks.shared(1, train, name, True)
    held = {1: [whole]}
    for size in (2, 4):
        found = ranks.shared(size, train, name, True)
        assert all(own_losses == losses for own_losses, _, _ in found)
        assert list(found[0][1]) == list(state)
        assert not any(own_state for _, own_state, _ in found[1:])
        assert digest(sorted(found[0][1].items())) == digest(sorted(state.items())), size
        held[size] = [own for _, _, own in found]
    [(expected_losses, expected, _)] = ranks.shared(1, train, name, False)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(state, dict(expected), rtol=1e-9, atol=1e-11)
    if name == "layers":
        assert all(own < 1.2 * whole / size for size in (2, 4) for own in held[size])
    if name == "paths":
        bias = 5
        assert sum(held[2]) - bias == sum(held[4]) - 3 * bias == whole
        assert max(held[4]) < max(held[2]) < whole


def sent_by(model: nn.Module, words: Words, x: Tensor, parts: int = 4) -> list[int]:
    """Bytes that this rank sends in forward and in backward."""
    split = firecaffe.adapt.split_layers(model, words, parts=parts)
    traffic = split.group.group.traffic
    try:
        split(x)
        ends = [traffic.sent_bytes or 0]
        y = split(x)
        ends.append(traffic.sent_bytes or 0)
        y.sum().backward()
        ends.append(traffic.sent_bytes or 0)
        return [ends[1] - ends[0], ends[2] - ends[1]]
    finally:
        del split
        dist.destroy_process_group()


def sent_halos() -> list[int]:
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.LocalResponseNorm(5))
    return sent_by(model, {"0": "filters"}, torch.ones(2, 3, 5, 7))


def test_bytes_of_halos_are_those_of_the_formula(ranks: Ranks) -> None:
    """Two ranks stand at an end and send two channels, two others send four."""
    found = ranks.shared(4, sent_halos)
    channel = 4 * 2 * 5 * 7
    gathered = 4 * gather_numbers(4, 2 * 12 * 5 * 7, 12)
    assert found == [[channel * n + gathered, channel * n] for n in (2, 4, 4, 2)]
    assert sum(each[1] for each in found) / 4 == 4 * halo_numbers(4, 2 * 12 * 5 * 7, 12, 4)


def sent_paths() -> list[int]:
    x = torch.ones(2, 8, 5, 7).requires_grad_()
    return sent_by(nn.Sequential(Inception(8, WIDTHS, batch_norm=False)), {"0": "paths"}, x)


def test_bytes_of_paths_are_those_of_the_formula(ranks: Ranks) -> None:
    """Of 4, 6, 3 and 5 channels, all send as much as 6."""
    found = ranks.shared(4, sent_paths)
    sample = 2 * 5 * 7
    assert found == [found[0]] * 4
    assert sum(found[0]) == 4 * by_paths(4, 8 * sample, 6 * sample)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), Inception(8, WIDTHS, batch_norm=False))
    [module] = paths_on(network, torch.ones(2, 3, 5, 7))
    planned = module.volumes(2, 4)
    assert (planned.name, planned.paths, planned.cheapest) == ("1", 4, "data")
    assert planned.by_paths == by_paths(4, 8 * sample, 6 * sample)
    assert (planned.inputs, planned.outputs) == (8 * 35, 18 * 35)
    assert module.volumes(2, 5).by_paths is None
    assert planned.by_data == 2 * 3 / 4 * sum(each.numel() for each in network[1].parameters())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "padding": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "stride": lambda: nn.Conv2d(3, 4, 5, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(3, 2, 3, padding=2, dilation=2),
    "norm": lambda: nn.BatchNorm2d(3),
}


def sent_rows(name: str, wants_gradient: bool, height: int) -> list[int]:
    x = torch.ones(2, 3, height, 5).requires_grad_(wants_gradient)
    return sent_by(nn.Sequential(LAYERS[name]()), {"0": "rows"}, x)


def test_bytes_of_rows_are_those_of_the_formula(ranks: Ranks) -> None:
    """A row goes over a border each way. The input was whole and is to be, and so the output."""
    found = ranks.shared(4, sent_rows, "padding", True, 8)
    weights, row = 4 * 3 * 9 + 4, 2 * 3 * 5
    output = gather_numbers(4, 2 * 4 * 8 * 5, 8)
    whole = gather_numbers(4, 2 * 3 * 8 * 5, 8) + output
    assert sum(map(sum, found)) / 4 == 4 * (by_rows(4, weights, 2 * row) + whole)
    assert found[0][0] == 4 * (row + output)


@pytest.mark.parametrize("name", ["stride", "dilation", "norm"])
@pytest.mark.parametrize("wants_gradient", [True, False])
def test_what_is_planned_of_rows_is_what_they_send(
    ranks: Ranks, name: str, wants_gradient: bool
) -> None:
    found = ranks.shared(4, sent_rows, name, wants_gradient, 11)
    [planned] = layers_on(nn.Sequential(LAYERS[name]()), torch.ones(2, 3, 11, 5))
    assert planned.images is not None
    sizes = dataclasses.replace(planned.sizes, input_has_gradient=wants_gradient)
    assert sum(map(sum, found)) / 4 == pytest.approx(4 * (planned.images.numbers(sizes, 2, 4) or 0))
    assert planned.images.numbers(sizes, 2, 12) is None


def load(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was saved of two parts on one rank, in two parts on two."""
    split = firecaffe.adapt.split_layers(nn.Sequential(Fire(6, 3, 5)), {"0": "paths"}, parts=2)
    try:
        split.load_whole_state_dict(state)
        return split.whole_state_dict()
    finally:
        del split
        dist.destroy_process_group()


def test_tensors_that_some_ranks_have_are_saved_and_loaded(ranks: Ranks) -> None:
    state = nn.Sequential(Fire(6, 3, 5)).state_dict()
    found, of_second = ranks.shared(2, load, state)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert not of_second


def in_rows() -> nn.Module:
    """Halos of pools in ceil mode, a pool that makes too few rows, and a dense layer in parts."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 11, 4), nn.ReLU(), LocalResponseNorm(3, 0.5), nn.Dropout(0.2)),
        *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(4, 6, 5, padding=2, groups=2)),
        *(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 4, 3, padding=1)),
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


PLANNED: dict[str, tuple[Callable[[], nn.Module], Words, tuple[int, int, int]]] = {
    "in_rows": (
        in_rows,
        {"0": "rows", "5": "rows", "6": "rows", "9": "rows", "12": "inputs"},
        (3, 71, 55),
    ),
    "in_paths": (
        in_paths,
        {"0": "filters", "3": "paths", "5": "paths", "7": "neurons"},
        (3, 12, 12),
    ),
    "in_two": (in_two, {"0": "paths", "2": "rows"}, (3, 7, 5)),
}
"""Networks, each with what it is split by, and its images."""


def sent(name: str, parts: int) -> list[int]:
    make, words, shape = PLANNED[name]
    torch.manual_seed(0)  # ranks draw alike, whatever these have drawn before
    return sent_by(make(), words, torch.ones(2, *shape), parts)


@pytest.mark.parametrize(
    ("name", "workers", "parts"),
    [
        *(("in_rows", 2, 2), ("in_rows", 2, 4), ("in_rows", 4, 4)),
        *(("in_paths", 2, 2), ("in_paths", 2, 4), ("in_paths", 4, 4), ("in_two", 2, 2)),
    ],
)
def test_what_is_planned_of_a_network_is_sent(
    ranks: Ranks, name: str, workers: int, parts: int
) -> None:
    found = ranks.shared(workers, sent, name, parts)
    _, words, shape = PLANNED[name]
    config = ModelConfig(f"{__name__}:{name}")
    work = workload_of_model(config, shape, 2, 2)
    layout = OwnLayout(ParallelConfig(1, workers, words, parts), words)
    cluster = load_cluster("ethernet-10g")
    (plan,) = own_cost(config, work, layout).plans(cluster, workers, "tree")
    assert plan.step.activations_bytes == pytest.approx(sum(map(sum, found)) / workers)
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
    found = json.loads((tmp_path / "run" / "forecast.json").read_text())
    mean = sum(each or 0 for each in sent) / len(sent)
    assert found["gradients_bytes"] + found["activations_bytes"] == pytest.approx(mean, rel=0.02)
    head = 3 / 2 * 4 * (405_000 + 510) / 2  # of each worker; a bias by inputs is whole
    assert found["gradients_bytes"] == pytest.approx(
        head + 2 * 3 / 4 * 4 * (431_080 - 405_510), rel=0.01
    )
