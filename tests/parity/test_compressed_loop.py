"""Training with a codec against a bare PyTorch loop that encodes: the same weights, bit for bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import firecaffe
from firecaffe import ExchangeConfig, Recipe
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.errors import RecipeError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.codec import LowRank, RowCodec, TensorCodec
from tests.kit.worlds import changed
from tests.parity.network import (
    DECAY,
    KEPT_BACK,
    MICRO_BATCH,
    MOMENTUM,
    RATE,
    SEED,
    STEPS,
    Net,
    dense,
    gradients_of,
    ours,
    recipe_for,
    same_bits,
    state_tensors,
    tree_sum,
)

MICRO_BATCHES = 5
BATCH = MICRO_BATCH * MICRO_BATCHES
CODECS = [name for name, codec in COMPRESSORS.items() if isinstance(codec, RowCodec | TensorCodec)]

Memory: TypeAlias = dict[tuple[int, str], Tensor]
"""What was kept back, by node and by parameter."""


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
    return NetWithRare()


def data(num_samples: int) -> TensorDataset:
    """Images above 0 in the even steps of an epoch, below 0 in the others."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(num_samples, 2, 8, 8, generator=generator)
    order = SampleOrder(SEED, num_samples, BATCH, MICRO_BATCH)
    for step in range(1, order.steps_per_epoch, 2):
        for leaf in range(MICRO_BATCHES):
            images[order.micro_batch(step, leaf)] *= -1
    return TensorDataset(images, torch.randint(0, 5, (num_samples,), generator=generator), 5)


def coded(folder: Path, compressor: str, level: int = 0, clip: float = 0.0) -> Recipe:
    words = ExchangeConfig(compressor=compressor, compressor_level=level, bucket_bytes=2_000)
    return changed(recipe_for(folder, BATCH, exchange=words), solver={"clip_gradients": clip})


def through(codec: RowCodec | TensorCodec, x: Tensor, memory: Tensor) -> Tensor:
    """What arrives of one parameter's elements."""
    if isinstance(codec, TensorCodec):
        return codec.decode(codec.encode(x, memory), x.numel())
    rows = F.pad(x, (0, -x.numel() % codec.row_elements))
    return codec.decode(codec.encode(rows))[: x.numel()]


def add_encoded(
    codec: RowCodec | TensorCodec, gradients: Sequence[Tensor], memories: list[Tensor]
) -> Tensor:
    """The sum of what arrives of each node's gradient of one parameter; memories keep the rest."""
    arrived = []
    for node, gradient in enumerate(gradients):
        x = gradient.reshape(-1) + memories[node]
        arrived.append(through(codec, x, memories[node]))
        if isinstance(codec, TensorCodec) or codec.remembers:
            memories[node] = x - arrived[-1]
    total = tree_sum(arrived)
    if isinstance(codec, RowCodec):  # which encodes the total, too, for the way back
        total = through(codec, total, torch.zeros_like(total))
    return total.view_as(gradients[0])


def bare_loop(
    net: Net, train_set: TensorDataset, compressor: str, level: int, clip: float
) -> tuple[dict[str, Tensor], Memory]:
    """One process and no part of ours but the codec and the order of samples."""
    codec = COMPRESSORS[compressor]
    assert isinstance(codec, RowCodec | TensorCodec)
    order = SampleOrder(SEED, len(train_set), BATCH, MICRO_BATCH)
    parameters = dict(net.named_parameters())
    optimizer = optim.SGD(net.parameters(), RATE, MOMENTUM, weight_decay=DECAY)
    starts = range(0, MICRO_BATCHES, 1 << level)
    memories = {name: [torch.zeros(p.numel()) for _ in starts] for name, p in parameters.items()}
    for step in range(STEPS):
        weight = order.samples_in_step(step) / MICRO_BATCH
        leaves = [gradients_of(net, train_set, order, step, leaf) for leaf in range(MICRO_BATCHES)]
        for index, (name, parameter) in enumerate(parameters.items()):
            of_leaves = [gradients[index] for gradients in leaves]
            whole = dense(of_leaves, parameter)
            nodes = [tree_sum(whole[start : start + (1 << level)]) / weight for start in starts]
            total = add_encoded(codec, nodes, memories[name])
            # What was kept back may arrive in a step that does not use the parameter.
            has_any = any(g is not None for g in of_leaves) or bool(total.any())
            parameter.grad = total if has_any else None
        if clip:
            assert nn.utils.clip_grad_norm_(net.parameters(), clip) > clip
        optimizer.step()
    kept = {
        (node, name): each[node] for name, each in memories.items() for node in range(len(each))
    }
    return state_tensors(net, optimizer), kept


@pytest.mark.parametrize(
    ("level", "num_samples", "clip"), [(0, 100, 0.0), (1, 37, 0.0), (0, 37, 0.05)]
)
@pytest.mark.parametrize("compressor", CODECS)
def test_nodes_are_encoded_and_added_in_tree_order(
    tmp_path: Path, net: Net, compressor: str, level: int, num_samples: int, clip: float
) -> None:
    """5 micro-batches, so that the last node of level 1 is a single one. 37 samples: an epoch ends
    within the training with a step of 7, in micro-batches of 3, 3, 1 and two without any."""
    train_set = data(num_samples)
    found = ours(net, train_set, coded(tmp_path, compressor, level, clip))
    expected, memory = bare_loop(net, train_set, compressor, level, clip)
    codec = COMPRESSORS[compressor]
    if isinstance(codec, TensorCodec) or (isinstance(codec, RowCodec) and codec.remembers):
        expected |= {f"{KEPT_BACK}{node}.{name}": kept for (node, name), kept in memory.items()}
    same_bits(found, expected)


def test_steps_do_skip_a_parameter(net: Net) -> None:
    """The control: or nothing above showed what becomes of its memory."""
    train_set = data(37)
    order = SampleOrder(SEED, 37, BATCH, MICRO_BATCH)
    uses = [
        [gradients_of(net, train_set, order, step, leaf)[0] is not None for leaf in range(5)]
        for step in range(3)
    ]
    assert next(net.named_parameters())[0] == "rare"
    assert uses == [[True] * 5, [False] * 5, [True, True, True, False, False]]


@pytest.fixture(autouse=True)
def low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices here are small; with the rank of a real training they would not shrink."""
    monkeypatch.setitem(COMPRESSORS, "power_sgd", LowRank(4))


@pytest.mark.parametrize("compressor", ["int8", "one_bit", "power_sgd"])
def test_resume_needs_what_was_kept_back(
    tmp_path: Path, net: Net, compressor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_set = data(37)
    whole = ours(net, train_set, coded(tmp_path / "whole", compressor))
    recipe = coded(tmp_path / "half", compressor)
    half = changed(recipe, train={"steps": 3})
    ours(net, train_set, half)
    run = Path(half.run.folder)
    same_bits(ours(net, train_set, coded(tmp_path / "resumed", compressor), run), whole)

    monkeypatch.setattr("firecaffe.gradients.codec_memory.CodecMemory.load", lambda *_: None)
    forgetful = ours(net, train_set, coded(tmp_path / "forgetful", compressor), run)
    assert any(not torch.equal(value, whole[name]) for name, value in forgetful.items())


def test_what_no_codec_encodes_is_refused(tmp_path: Path, net: Net) -> None:
    """A communication hook beside it, and double precision."""
    hook = (None, lambda _, bucket: bucket.buffer())
    with pytest.raises(RecipeError, match=r"comm_hook with .*exchange\.compressor = int8"):
        firecaffe.train(coded(tmp_path, "int8"), lambda: net, data(37), data(37), comm_hook=hook)
    net.head.double()
    with pytest.raises(RecipeError, match=r"int8 encodes float32; head.weight is torch\.float64"):
        ours(net, data(37), coded(tmp_path, "int8"))
