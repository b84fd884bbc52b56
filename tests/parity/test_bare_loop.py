"""The whole training on one worker against a bare PyTorch loop, which may encode: the same weights,
bit for bit.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import firecaffe
from firecaffe import DataConfig, ExchangeConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.cluster.agree import digest
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.errors import RecipeError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.codec import LowRank, RowCodec, TensorCodec
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.tensor_file import TensorFile
from tests.kit.training import ALONE
from tests.kit.training_steps import state_of
from tests.kit.worlds import changed

SEED, STEPS, RATE, MOMENTUM, DECAY = 11, 6, 0.05, 0.9, 0.001
MICRO_BATCH = 3
CODED_BATCH = 5 * MICRO_BATCH
KEPT_BACK = "kept back/"
"""Before the names of what a compressor keeps."""

Codec: TypeAlias = RowCodec | TensorCodec
CODECS = [name for name, codec in COMPRESSORS.items() if isinstance(codec, Codec)]


class Net(nn.Module):
    """No dropout, whose noise is keyed by micro-batch, and no statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(6 * 9, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.conv1(images))
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class NetWithRare(Net):
    """One parameter is used where images are bright; `data` makes those of every other step so."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Parameter(torch.linspace(-1, 1, 300).view(5, 60))

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        if images.mean() > 0:
            logits = logits + torch.tanh(self.rare * images.sum()).sum(1)
        return logits


@pytest.fixture
def net() -> Net:
    torch.manual_seed(SEED)
    return Net()


@pytest.fixture
def rare() -> NetWithRare:
    torch.manual_seed(SEED)
    return NetWithRare()


def data(num_samples: int) -> TensorDataset:
    """Images above 0 in the even steps of an epoch of `CODED_BATCH`, below 0 in the others."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(num_samples, 2, 8, 8, generator=generator)
    order = SampleOrder(SEED, num_samples, CODED_BATCH, MICRO_BATCH)
    for step in range(1, order.steps_per_epoch, 2):
        for leaf in range(order.num_micro_batches):
            images[order.micro_batch(step, leaf)] *= -1
    return TensorDataset(images, torch.randint(0, 5, (num_samples,), generator=generator), 5)


def recipe_for(folder: Path, batch: int, micro_batch: int = MICRO_BATCH, **sections: Any) -> Recipe:
    words: dict[str, Any] = {
        "train": TrainConfig(batch, micro_batch, steps=STEPS, seed=SEED),
        "solver": SolverConfig(base_lr=RATE, momentum=MOMENTUM, weight_decay=DECAY),
        "run": RunConfig(folder=str(folder / "run"), tensorboard=False),
    }
    return Recipe(**(words | sections))


def coded(folder: Path, compressor: str, level: int = 0, clip: float = 0.0) -> Recipe:
    words = ExchangeConfig(compressor=compressor, compressor_level=level, bucket_bytes=2_000)
    recipe = recipe_for(folder, CODED_BATCH, exchange=words)
    return changed(recipe, solver={"clip_gradients": clip})


def ours(
    net: nn.Module, train_set: TensorDataset, recipe: Recipe, resume: Path | None = None
) -> dict[str, Tensor]:
    """All tensors of the last checkpoint of `firecaffe.train`, and what a compressor keeps back."""
    result = firecaffe.train(
        recipe, lambda: copy.deepcopy(net), train_set, train_set, resume=resume
    )
    checkpoint = load_newest(result.folder)[0]
    tensors = dict(checkpoint.tensors)
    names = [f"parameter/{name}" for name, _ in net.named_parameters()]
    assert result.weights_sha256 == digest((name, tensors[name]) for name in names)
    for path in checkpoint.piece_files.values():
        tensors |= {f"{KEPT_BACK}{key}": value for key, value in TensorFile(path).items()}
    return tensors


def gradients_of(
    net: Net, train_set: TensorDataset, order: SampleOrder, step: int, leaf: int
) -> Sequence[Tensor | None]:
    """One micro-batch's, None for a parameter that it does not use."""
    samples = order.micro_batch(step, leaf)
    parameters = list(net.parameters())
    if len(samples) == 0:
        return [None] * len(parameters)
    loss = F.cross_entropy(net(train_set.inputs[samples]), train_set.targets[samples])
    if len(samples) < MICRO_BATCH:
        loss = loss * (len(samples) / MICRO_BATCH)
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def dense(gradients: Iterable[Tensor | None], parameter: Tensor) -> list[Tensor]:
    return [torch.zeros_like(parameter) if each is None else each for each in gradients]


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    """The left subtree is the largest whole one; each pair is added once, left to right."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return tree_sum(values[:half]) + tree_sum(values[half:])


Mean = Callable[[str, Sequence[Tensor], float], Tensor]
"""A parameter's gradient, by its name, of those of micro-batches; over so many of them."""


def in_tree_order(_: str, leaves: Sequence[Tensor], weight: float) -> Tensor:
    return tree_sum(leaves) / weight


def left_to_right(_: str, leaves: Sequence[Tensor], weight: float) -> Tensor:
    total = leaves[0]
    for leaf in leaves[1:]:
        total = total + leaf
    return total / weight


class Encoded:
    """By a codec, which encodes each node of the tree at a level."""

    def __init__(self, codec: Codec, level: int) -> None:
        self.codec, self.width = codec, 1 << level
        self.kept: dict[str, Tensor] = {}
        """What was kept back, by node and parameter."""

    def __call__(self, name: str, leaves: Sequence[Tensor], weight: float) -> Tensor:
        """The sum of what arrives of each node's gradient; the rest is kept."""
        arrived = []
        for node, start in enumerate(range(0, len(leaves), self.width)):
            gradient = tree_sum(leaves[start : start + self.width]) / weight
            key = f"{node}.{name}"
            memory = self.kept.get(key, torch.zeros(gradient.numel()))
            x = gradient.reshape(-1) + memory
            arrived.append(self.through(x, memory))
            self.kept[key] = x - arrived[-1] if self.remembers else memory
        total = tree_sum(arrived)
        if isinstance(self.codec, RowCodec):  # which encodes the total, too, for the way back
            total = self.through(total, torch.zeros_like(total))
        return total.view_as(leaves[0])

    @property
    def remembers(self) -> bool:
        return isinstance(self.codec, TensorCodec) or self.codec.remembers

    def through(self, x: Tensor, memory: Tensor) -> Tensor:
        """What arrives of one parameter's elements."""
        if isinstance(self.codec, TensorCodec):
            return self.codec.decode(self.codec.encode(x, memory), x.numel())
        rows = F.pad(x, (0, -x.numel() % self.codec.row_elements))
        return self.codec.decode(self.codec.encode(rows))[: x.numel()]


def bare_loop(
    net: Net, train_set: TensorDataset, batch: int, mean: Mean, clip: float = 0.0
) -> dict[str, Tensor]:
    """One process and no part of ours but a codec and the order of samples."""
    order = SampleOrder(SEED, len(train_set), batch, MICRO_BATCH)
    parameters = dict(net.named_parameters())
    optimizer = optim.SGD(net.parameters(), RATE, MOMENTUM, weight_decay=DECAY)
    for step in range(STEPS):
        weight = order.samples_in_step(step) / MICRO_BATCH
        leaves = range(order.num_micro_batches)
        of_leaves = [gradients_of(net, train_set, order, step, leaf) for leaf in leaves]
        for index, (name, parameter) in enumerate(parameters.items()):
            own = [gradients[index] for gradients in of_leaves]
            gradient = mean(name, dense(own, parameter), weight)
            # What was kept back may arrive in a step that does not use the parameter.
            has_any = any(each is not None for each in own) or bool(gradient.any())
            parameter.grad = gradient if has_any else None
        if clip:
            assert nn.utils.clip_grad_norm_(net.parameters(), clip) > clip
        optimizer.step()
    return state_tensors(net, optimizer)


def state_tensors(net: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors of a training, by their names in a checkpoint."""
    return state_of(ALONE, net, optimizer).tensors_held_by_all()


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value.view(torch.int32), expected[name].view(torch.int32)), name


def moved(found: dict[str, Tensor], net: Net) -> None:
    for name, parameter in net.named_parameters():
        assert not torch.equal(found[f"parameter/{name}"], parameter), name


@pytest.mark.parametrize("num_samples", [60, 32])
def test_one_micro_batch(tmp_path: Path, net: Net, num_samples: int) -> None:
    """60 samples: no epoch ends within 6 steps of 8. 32: one does, with a whole step."""
    train_set = data(num_samples)
    found = ours(net, train_set, recipe_for(tmp_path, 8, 8))
    moved(found, net)
    order = SampleOrder(SEED, num_samples, 8, 8)
    optimizer = optim.SGD(net.parameters(), RATE, MOMENTUM, weight_decay=DECAY)
    for step in range(STEPS):
        samples = order.micro_batch(step, 0)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(train_set.inputs[samples]), train_set.targets[samples])
        torch.autograd.backward(loss)
        optimizer.step()
    same_bits(found, state_tensors(net, optimizer))


@pytest.mark.parametrize("num_micro_batches", [2, 3, 5, 7, 11])
@pytest.mark.parametrize("num_samples", [200, 37])
def test_several_micro_batches_in_tree_order(
    tmp_path: Path, net: Net, num_micro_batches: int, num_samples: int
) -> None:
    """37 samples: an epoch ends within the training, with short and empty micro-batches."""
    train_set, batch = data(num_samples), MICRO_BATCH * num_micro_batches
    found = ours(net, train_set, recipe_for(tmp_path, batch))
    moved(found, net)
    same_bits(found, bare_loop(net, train_set, batch, in_tree_order))


def test_neither_buckets_nor_the_exchange_enter(tmp_path: Path, net: Net) -> None:
    train_set = data(50)
    expected = bare_loop(copy.deepcopy(net), train_set, 18, in_tree_order)
    for index, (algorithm, bucket_bytes) in enumerate([("ring", 1), ("native", 300)]):
        exchange = ExchangeConfig(algorithm, bucket_bytes=bucket_bytes)
        recipe = recipe_for(tmp_path / str(index), 18, exchange=exchange)
        same_bits(ours(net, train_set, recipe), expected)


def test_another_order_gives_other_bits(tmp_path: Path, net: Net) -> None:
    """The control: were all orders equal here, the tests above would show nothing."""
    train_set = data(200)
    found = ours(net, train_set, recipe_for(tmp_path, 24))
    other = bare_loop(net, train_set, 24, left_to_right)
    assert any(not torch.equal(value, other[name]) for name, value in found.items())
    for name, value in found.items():
        torch.testing.assert_close(value, other[name])


def test_images_reach_the_network_normalized(tmp_path: Path, net: Net) -> None:
    """Bytes, mean and deviation of the recipe against the same written out."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (40, 2, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(40) % 5
    recipe = recipe_for(tmp_path, 9, data=DataConfig(mean=[0.25, 0.5], std=[0.125]))
    found = ours(net, TensorDataset(images, labels), recipe)
    mean = torch.tensor([0.25, 0.5]).view(1, 2, 1, 1)
    plain = TensorDataset((images.float() / 255 - mean) / 0.125, labels)
    same_bits(found, bare_loop(net, plain, 9, in_tree_order))


@pytest.fixture
def low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices here are small; with the rank of a real training they would not shrink."""
    monkeypatch.setitem(COMPRESSORS, "power_sgd", LowRank(4))


@pytest.mark.parametrize(
    ("level", "num_samples", "clip"), [(0, 100, 0.0), (1, 37, 0.0), (0, 37, 0.05)]
)
@pytest.mark.parametrize("compressor", CODECS)
def test_nodes_are_encoded_and_added_in_tree_order(
    tmp_path: Path, rare: Net, compressor: str, level: int, num_samples: int, clip: float
) -> None:
    """5 micro-batches, so that the last node of level 1 is a single one. 37 samples: an epoch ends
    within the training with a step of 7, in micro-batches of 3, 3, 1 and two without any.
    """
    train_set, codec = data(num_samples), COMPRESSORS[compressor]
    assert isinstance(codec, Codec)
    found = ours(rare, train_set, coded(tmp_path, compressor, level, clip))
    mean = Encoded(codec, level)
    expected = bare_loop(rare, train_set, CODED_BATCH, mean, clip)
    if mean.remembers:
        expected |= {f"{KEPT_BACK}{key}": kept for key, kept in mean.kept.items()}
    same_bits(found, expected)


def test_steps_do_skip_a_parameter(rare: Net) -> None:
    """The control: or nothing above showed what becomes of its memory."""
    train_set = data(37)
    order = SampleOrder(SEED, 37, CODED_BATCH, MICRO_BATCH)
    uses = [
        [gradients_of(rare, train_set, order, step, leaf)[0] is not None for leaf in range(5)]
        for step in range(3)
    ]
    assert next(rare.named_parameters())[0] == "rare"
    assert uses == [[True] * 5, [False] * 5, [True, True, True, False, False]]


@pytest.mark.parametrize("compressor", ["int8", "one_bit", "power_sgd"])
def test_resume_needs_what_was_kept_back(
    tmp_path: Path, rare: Net, low_rank: None, compressor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_set, run = data(37), tmp_path / "half" / "run"
    whole = ours(rare, train_set, coded(tmp_path / "whole", compressor))
    ours(rare, train_set, changed(coded(tmp_path / "half", compressor), train={"steps": 3}))
    same_bits(ours(rare, train_set, coded(tmp_path / "resumed", compressor), run), whole)

    monkeypatch.setattr("firecaffe.gradients.bucket_sums.CodecMemory.load", lambda *_: None)
    forgetful = ours(rare, train_set, coded(tmp_path / "forgetful", compressor), run)
    assert any(not torch.equal(value, whole[name]) for name, value in forgetful.items())


def test_what_no_codec_encodes_is_refused(tmp_path: Path, net: Net) -> None:
    """A communication hook beside it, and double precision."""
    hook = (None, lambda _, bucket: bucket.buffer())
    with pytest.raises(RecipeError, match=r"comm_hook with .*exchange\.compressor = int8"):
        firecaffe.train(coded(tmp_path, "int8"), lambda: net, data(37), data(37), comm_hook=hook)
    net.head.double()
    with pytest.raises(RecipeError, match=r"int8 encodes float32; head.weight is torch\.float64"):
        ours(net, data(37), coded(tmp_path, "int8"))
