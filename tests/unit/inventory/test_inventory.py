"""What a network has, changes and draws, and what its loss is a mean of."""

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from benchmarks.training.unusual import layers, refused
from benchmarks.training.unusual.layers import contrast
from benchmarks.training.unusual.teachers import Teacher
from firecaffe.data import from_torch
from firecaffe.errors import RecipeError
from firecaffe.generators import NUMPY, PYTHON, TORCH
from firecaffe.inventory.attributes import (
    attributes_of,
    attributes_of_data,
    attributes_of_loss,
    carried_over,
)
from firecaffe.inventory.findings import MEAN, RAISED, UNKNOWN, WHOLE, check_reduction, mean_of
from firecaffe.inventory.network_state import Changes, ForwardWatch, check_state, kinds_of
from tests.kit.training_modules import Composed

Loss = Callable[[Tensor, Tensor], Tensor]

Closed = type("Closed", (tuple,), {"__len__": None, "__iter__": None})  # as of e3nn


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.word = 0, "a"
        self.list: list[Any] = [0, {"deep": Closed((torch.zeros(2), None))}]
        self.array = np.zeros(3)
        self.of_torch, self.of_python = torch.Generator(), random.Random(0)
        self.of_numpy = np.random.default_rng(0)
        self.of_numpy_before = np.random.RandomState(0)
        self.of_numpy_before.rand()  # the next draws move its place alone
        self.hidden = [nn.BatchNorm1d(2)]
        self.layer = nn.Linear(2, 2)
        self.opaque = object()


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "0.count": lambda holder: setattr(holder, "count", 1),
    "0.word": lambda holder: setattr(holder, "word", "b"),
    "0.list[1]['deep'][0]": lambda holder: holder.list[1]["deep"][0].fill_(1),
    "len(0.list)": lambda holder: holder.list.append(1),
    "0.array": lambda holder: holder.array.fill(1),
    "0.of_torch": lambda holder: torch.rand(1, generator=holder.of_torch),
    "0.of_python": lambda holder: holder.of_python.random(),
    "0.of_numpy": lambda holder: holder.of_numpy.random(),
    "0.of_numpy_before": lambda holder: holder.of_numpy_before.rand(),
    "0.hidden[0].running_mean": lambda holder: holder.hidden[0](torch.randn(4, 2)),
}
BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
WITH_IT = {"0.list[2]", *(f"0.hidden[0].{name}" for name in BATCH_NORM)}


@pytest.mark.parametrize("path", CHANGES)
def test_what_changes_is_seen(path: str) -> None:
    holder = Holder()
    network = nn.Sequential(holder)
    before = attributes_of(network)
    CHANGES[path](holder)
    after = attributes_of(network)
    changed = {name for name in after if before.get(name) != after[name]}
    assert path in changed <= {path, *WITH_IT}


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, _: Tensor) -> Tensor:
        self.calls += 1
        return outputs.mean()

    def method(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


class InSlots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = itertools.count()

    def __call__(self, outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.mean() * next(self.calls)


def closure() -> Loss:
    calls = 0

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return outputs.mean()

    return loss


LOSSES_THAT_COUNT: dict[str, Loss] = {
    "loss.calls": Counting(),
    "loss.func.calls": partial(Counting()),
    "loss.calls by a method": Counting().method,
    "loss.calls in a closure": closure(),
    "loss.calls in slots": InSlots(),
}


def carried(digests: Callable[[], dict[str, str]], call: Callable[[], object]) -> list[str]:
    """What is carried over, by three digests with a call after each."""
    return carried_over(*[(digests(), call())[0] for _ in range(3)])


@pytest.mark.parametrize("path", LOSSES_THAT_COUNT)
def test_what_a_loss_counts_is_seen(path: str) -> None:
    loss = LOSSES_THAT_COUNT[path]
    seen = carried(lambda: attributes_of_loss(loss), lambda: loss(VALUES, VALUES))
    assert seen == [path.partition(" ")[0]]
    assert not carried(lambda: attributes_of_loss(F.cross_entropy), list)


def test_what_a_schedule_that_a_network_calls_counts_is_seen() -> None:
    network = Composed(lambda module, values: module.schedule(values, values), schedule=Counting())
    seen = carried(lambda: attributes_of(network), lambda: network(VALUES))
    assert seen == ["schedule.calls"]


HOOKED: dict[str, Callable[[nn.Linear, Callable[..., None]], object]] = {
    "_forward_pre_hooks": nn.Linear.register_forward_pre_hook,
    "_forward_hooks": nn.Linear.register_forward_hook,
    "_backward_hooks": nn.Linear.register_full_backward_hook,
    "weight._backward_hooks": lambda layer, hook: layer.weight.register_hook(hook),  # type: ignore[no-untyped-call]
    "bias._post_accumulate_grad_hooks": lambda layer, hook: (
        layer.bias.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    ),
}


@pytest.mark.parametrize("member", HOOKED)
def test_what_a_hook_keeps_is_seen(member: str) -> None:
    layer, kept = nn.Linear(layers.WIDTH, 2), set[int]()

    def hook(*_: object, by_default: set[int] = kept) -> None:
        by_default.add(len(by_default))

    HOOKED[member](layer, hook)
    values = VALUES.clone().requires_grad_()
    seen = carried(lambda: attributes_of(layer), lambda: layer(values).sum().backward())
    assert seen[0] == f"len({member}[0].defaults['by_default'])"


class Seen(Dataset[Tensor]):
    def __init__(self) -> None:
        self.seen, self.cache, self.files = 0, dict[int, Tensor](), ["a"] * 1000

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        self.seen += 1
        return self.cache.setdefault(index, torch.zeros(1))


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda seen: seen, "seen"),
        (lambda seen: Subset(seen, [1, 0]), "dataset.seen"),
        (from_torch, "seen"),
    ],
)
def test_what_a_data_set_counts_is_seen(wrap: Callable[[Any], Any], path: str) -> None:
    dataset = Seen()
    seen = carried(lambda: attributes_of_data(wrap(dataset)), lambda: dataset[0])
    assert seen == [path]  # and no cache, which is full


def test_what_a_module_has_by_torch_is_no_attribute() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = attributes_of(network)
    network(torch.randn(4, 2))
    network.eval()
    assert attributes_of(network) == before


VALUES = torch.randn(8, layers.WIDTH, generator=torch.Generator().manual_seed(0))


def around(network: nn.Module) -> Changes:
    watch = ForwardWatch(network)
    network(VALUES)
    return watch.changes()


def test_what_a_forward_changes() -> None:
    plain = nn.Sequential(nn.Linear(layers.WIDTH, 2), nn.BatchNorm1d(2))
    assert around(plain) == Changes([], {}, {}, [])
    queue = around(layers.Queue())
    assert (queue.in_places, queue.steps) == ({"queue": "8 of its 64 rows"}, {"place": 8})
    assert around(Teacher()).frozen == ["teacher.weight", "teacher.bias"]


DRAWING = Composed(lambda _, values: values * random.random() * np.random.rand())


@pytest.mark.parametrize(
    ("network", "draws"),
    [(nn.Dropout(), [TORCH]), (DRAWING, [PYTHON, NUMPY]), (nn.Linear(layers.WIDTH, 2), [])],
)
def test_generators_that_are_drawn_from(network: nn.Module, draws: list[str]) -> None:
    assert around(network).draws == draws


class Scaling(nn.Module):
    """Writes the same value as there was: the next may be another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 2)
        return values * self.scale


class Making(nn.Module):
    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.make = make
        self.register_buffer("there", torch.zeros(2))

    def forward(self, values: Tensor) -> Tensor:
        self.make(self)
        return values


PARAMETER = Making(lambda module: module.register_parameter("new", nn.Parameter(torch.zeros(2))))
BUFFER = Making(lambda module: module.register_buffer("new", torch.zeros(2)))
TYPE = Making(lambda module: setattr(module, "there", torch.zeros(2).double()))


@pytest.mark.parametrize(
    ("network", "part"),
    [
        (Scaling(), "parameter scale"),
        (refused.Clipping(), r"parameter layer\.weight"),
        (nn.Sequential(nn.Embedding(8, 2, max_norm=0.1)), r"0\.weight.*max_norm"),
        (refused.Replacing(), "replaces the parameter scale"),
        (refused.Growing(), "buffer seen"),
        (PARAMETER, "parameter new"),
        (BUFFER, "buffer new"),
        (TYPE, "float64"),
    ],
)
def test_what_cannot_be_kept_is_refused(network: nn.Module, part: str) -> None:
    watch = ForwardWatch(network)
    network(torch.arange(8) if isinstance(network, nn.Sequential) else VALUES)
    with pytest.raises(RecipeError, match=part):
        watch.changes()


def test_names_are_sorted_by_what_becomes_of_them() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), layers.Clamp(), layers.Tied())
    network[0].bias.requires_grad_(False)
    kinds = kinds_of(network)
    assert kinds.frozen == ["0.bias"]
    assert kinds.trained[:3] == ["0.weight", "1.weight", "1.bias"]
    assert kinds.averaged == ["1.running_mean", "1.running_var"]
    assert kinds.counted == ["1.num_batches_tracked"]
    assert kinds.extra == ["2"]
    assert kinds.shared == [["3.down.weight", "3.up.weight"]]


def test_a_sparse_buffer_is_refused() -> None:
    network = nn.Linear(2, 2)
    network.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(RecipeError, match="buffer mask is float32, sparse_coo"):
        check_state(network)


def test_parameters_that_only_lie_side_by_side_are_taken() -> None:
    memory = torch.randn(8)
    network = nn.Module()
    network.one, network.other = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    check_state(network)
    network.other = nn.Parameter(memory[3:])
    with pytest.raises(RecipeError, match="one and other share memory"):
        check_state(network)


WEIGHTS = torch.tensor([5.0, 1.0, 1.0, 2.0])


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(8, 4, generator=draw).to(dtype)
    return outputs, torch.randint(0, 4, (8,), generator=draw)


def decorrelation(outputs: Tensor, _: Tensor) -> Tensor:
    return (torch.cov(outputs.T) - torch.eye(4)).square().mean()


def cross_entropy(**words: Any) -> Loss:
    return lambda outputs, labels: F.cross_entropy(outputs, labels, **words)


def each_weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, WEIGHTS.to(outputs), reduction="none").mean()


def hardest(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none").max()


def among_some(outputs: Tensor, labels: Tensor) -> Tensor:
    counted = (labels > 1).float()
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return (losses * counted).sum() / counted.sum().clamp(min=1)


LOSSES: list[tuple[Loss, str]] = [
    (F.cross_entropy, MEAN),
    (each_weighted, MEAN),
    (lambda outputs, labels: outputs.sum() * 0, MEAN),
    (contrast, WHOLE),
    (decorrelation, WHOLE),
    (hardest, WHOLE),
    (lambda o, labels: F.cross_entropy(o.reshape(8, 4), labels), f"{RAISED} RuntimeError"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("loss", "of"), LOSSES)
def test_a_mean_and_one_of_the_whole(loss: Loss, of: str, dtype: torch.dtype) -> None:
    assert mean_of("loss", loss, *batch(dtype)) == of


WEIGHED: list[tuple[Loss, str]] = [
    (cross_entropy(weight=WEIGHTS), "weighted mean"),
    (among_some, "fewer than"),
    (cross_entropy(reduction="sum"), "a sum"),
]


@pytest.mark.parametrize(("loss", "part"), WEIGHED)
def test_what_a_micro_batch_would_weigh_is_refused(loss: Loss, part: str) -> None:
    with pytest.raises(RecipeError, match=part):
        mean_of("loss", loss, *batch())


def test_samples_without_a_label() -> None:
    outputs, labels = batch()
    labels[3] = -100
    with pytest.raises(RecipeError, match="ignore_index"):
        mean_of("loss", F.cross_entropy, outputs, labels)


def test_pixels_without_a_label() -> None:
    """Samples whose losses are alike, of which some have fewer labels, are weighed unequally."""
    draw = torch.Generator().manual_seed(1)
    outputs, labels = torch.randn(4, 4, 8, 8, generator=draw) / 2, torch.zeros(4, 8, 8).long()
    labels[1, 1:] = labels[2, 2:] = labels[3, 1:] = -100
    assert mean_of("loss", F.cross_entropy, outputs, labels) == WHOLE


def test_trees_of_outputs() -> None:
    outputs, labels = batch()

    def loss(outputs: dict[str, Tensor], labels: tuple[Tensor]) -> Tensor:
        return F.cross_entropy(outputs["logits"], labels[0])

    assert mean_of("loss", loss, {"logits": outputs}, (labels,)) == MEAN
    given = {"logits": outputs, "loss": torch.tensor(1.0)}
    assert mean_of("loss", lambda *_: given["loss"], given, labels) == UNKNOWN


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(WEIGHTS), nn.NLLLoss(WEIGHTS), nn.MSELoss(reduction="sum")]
)
def test_torchs_own_say_it_themselves(loss: nn.Module) -> None:
    with pytest.raises(RecipeError, match=type(loss).__name__):
        check_reduction("loss", loss)
    check_reduction("loss", nn.CrossEntropyLoss())
