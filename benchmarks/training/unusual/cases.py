"""The table of unusual networks, losses and data, and what each has to come to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations

from benchmarks.training.unusual import in_backward, refused, sets, watched
from benchmarks.training.unusual import layers as of
from benchmarks.training.unusual.layers import CLASSES, WIDTH, around
from benchmarks.training.unusual.teachers import Teacher
from firecaffe import TensorDataset


@dataclass(frozen=True)
class Case:
    """A network, and what else is unusual; and how it ends."""

    make: Callable[[], nn.Module]
    ends: str = ""
    """A word of the line that refuses it; empty: the same bits."""
    told: str = ""
    """A word of a note or doubt that the run has; empty: none is asked for."""
    doubted: bool = False
    """Whether the line is a doubt: other workers need not end in the same bits."""
    loss: Any = None
    ignored: bool = False
    """Whether some samples have no label."""
    samples: Callable[[], Any] | None = None
    """Makes the data set; None: images in memory."""


def dropping() -> nn.Module:
    return around(nn.Dropout(0.3))


def fake_quantized(*before: nn.Module) -> nn.Module:
    observer = MovingAverageMinMaxObserver
    return around(*before, FakeQuantize(observer, quant_min=0, quant_max=255))  # type: ignore[no-untyped-call]


def frozen() -> nn.Module:
    network = around(nn.BatchNorm1d(WIDTH), nn.ReLU())
    for parameter in network[1].parameters():
        parameter.requires_grad_(False)
    return network


def scripted() -> nn.Module:
    return around(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def spectral() -> nn.Module:
    return around(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))


def weight_normed() -> nn.Module:
    return around(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


def complex_buffer() -> nn.Module:
    network = around(nn.Identity())
    network.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    return network


def expanded() -> nn.Module:
    network = around(nn.Identity())
    network.register_parameter("one", nn.Parameter(torch.ones(1).expand(5)))
    return network


CASES: dict[str, Case] = {
    # what a network keeps
    "plain": Case(lambda: around(nn.ReLU())),
    "tied weights": Case(lambda: around(of.Tied())),
    "frozen layers": Case(frozen),
    "weight norm": Case(weight_normed),
    "spectral norm": Case(spectral),
    "BatchNorm, cumulative": Case(lambda: around(nn.BatchNorm1d(WIDTH, momentum=None))),
    "InstanceNorm, statistics": Case(
        lambda: nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), around())
    ),
    "mask of infinities": Case(lambda: around(of.Masked())),
    "odd parameters": Case(lambda: around(of.Odd())),
    "float64 layers": Case(lambda: around(of.Types(torch.float64))),
    "bfloat16 layers": Case(lambda: around(of.Types(torch.bfloat16))),
    "pairs of real numbers": Case(lambda: around(of.PairsOfReals())),
    "complex weights": Case(lambda: around(of.Wave()), ends="complex64"),
    "complex buffer": Case(complex_buffer, ends="complex64"),
    "lazy layers": Case(
        lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)), ends="no shape yet"
    ),
    "SyncBatchNorm": Case(lambda: around(nn.SyncBatchNorm(WIDTH)), ends="SyncBatchNorm"),
    "parameters in one memory": Case(lambda: around(refused.Overlapping()), ends="share memory"),
    "expanded parameter": Case(expanded, ends="expand"),
    "state in a way of its own": Case(lambda: around(refused.OwnWay()), ends="otherwise"),
    # extra state
    "extra state": Case(lambda: around(of.Clamp()), told="extra state"),
    "extra state of a class": Case(lambda: around(of.Peculiar()), ends="Peculiar"),
    # what forward changes
    "queue and pointer": Case(lambda: around(of.Queue()), told="queue"),
    "codebook": Case(lambda: around(of.Codebook())),
    "fake quantization": Case(fake_quantized),
    "fake quantization of ReLU": Case(lambda: fake_quantized(nn.ReLU())),
    "teacher, frozen": Case(lambda: around(Teacher()), told="teacher.weight"),
    "teacher, other memory": Case(
        lambda: around(Teacher(by_data=True, copied=True)), told="teacher.weight"
    ),
    "teacher, hidden": Case(
        lambda: around(Teacher(hidden=True, copied=True)), told="teacher[0]", doubted=True
    ),
    "Embedding, max_norm": Case(lambda: of.Words(max_norm=0.5), ends="max_norm"),
    "weights that forward clips": Case(lambda: around(refused.Clipping()), ends="layer.weight"),
    "a buffer that grows": Case(lambda: around(refused.Growing()), ends="seen"),
    "a parameter that is replaced": Case(lambda: around(refused.Replacing()), ends="scale"),
    "a frozen layer that thaws": Case(lambda: around(refused.Thawing()), ends="requires_grad"),
    "a count of calls": Case(lambda: around(of.Counting()), told="calls", doubted=True),
    "a cache": Case(lambda: around(of.Caching())),
    "a count in an object": Case(
        lambda: around(watched.Metered()), told="meter.calls", doubted=True
    ),
    "a count of evaluations": Case(
        lambda: around(watched.Evaluations()), told="2.seen", doubted=True
    ),
    "a parameter that evaluation changes": Case(
        lambda: around(watched.Projected()), ends="evaluation changes"
    ),
    "a buffer that forward makes": Case(
        lambda: around(watched.MadeLate()), ends="makes the buffer 2.mean"
    ),
    "weights that are merged": Case(lambda: around(watched.Merged())),
    "the number of ranks": Case(lambda: around(watched.ByRanks()), told="WORLD_SIZE", doubted=True),
    "LSTM": Case(of.Recurrent),
    "LSTM that carries its state": Case(
        lambda: of.Recurrent(carries=True), told="hidden", doubted=True
    ),
    "an optimizer in backward": Case(in_backward.updating, ends="backward changes"),
    "teacher, in backward": Case(
        lambda: around(in_backward.Following()), ends="backward changes the parameter 2.teacher"
    ),
    "a hook that keeps norms": Case(
        in_backward.scaling, told="backward carries over", doubted=True
    ),
    "a buffer of a hook": Case(
        lambda: around(in_backward.NormsInBuffer()), told="backward changes the buffer 2.norm"
    ),
    "a layer twice, checkpointed": Case(
        lambda: around(in_backward.Twice()), ends="use_reentrant=False"
    ),
    "an adversary": Case(lambda: around(in_backward.Adversary())),
    "inputs that are written to": Case(in_backward.Overwriting),
    # random numbers
    "dropout, checkpointed": Case(lambda: around(of.Checkpointed())),
    "depth by torch": Case(lambda: around(of.Depth(of.by_torch))),
    "depth by python": Case(lambda: around(of.Depth(of.by_python))),
    "depth by numpy": Case(lambda: around(of.Depth(of.by_numpy))),
    "depth by an own generator": Case(lambda: around(of.Depth()), told="own", doubted=True),
    "an own generator in evaluation": Case(
        lambda: around(watched.Sampled()), told="in evaluation", doubted=True
    ),
    # gradients
    "flow": Case(lambda: around(of.Coupling(), of.Coupling())),
    "gradient inside": Case(lambda: around(of.Penalty())),
    "gradient as output": Case(of.Forces),
    "layers used sometimes": Case(lambda: around(of.Sometimes())),
    "experts": Case(lambda: around(of.Experts())),
    "hooks on gradients": Case(lambda: around(of.Hooked())),
    "sparse gradients": Case(lambda: of.Words(sparse=True), ends="sparse"),
    "scripted layers": Case(scripted),
    # losses
    "loss, a sum": Case(around, ends="sum", loss=nn.CrossEntropyLoss(reduction="sum")),
    "loss, weighted": Case(
        around, ends="weight", loss=nn.CrossEntropyLoss(torch.tensor([5.0, 1, 1, 1]))
    ),
    "loss, own weighted mean": Case(
        around,
        ends="weighted mean",
        loss=lambda outputs, labels: nn.functional.cross_entropy(
            outputs, labels, torch.tensor([5.0, 1, 1, 1])
        ),
    ),
    "loss, samples without labels": Case(
        around, loss=nn.CrossEntropyLoss(), ignored=True, told="ignore_index"
    ),
    "loss, own without labels": Case(
        around,
        ends="fewer than the samples",
        loss=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels),
        ignored=True,
    ),
    "loss, root of a mean": Case(
        around,
        told="as a whole",
        loss=lambda outputs, labels: nn.functional.cross_entropy(outputs, labels).sqrt(),
    ),
    "loss, contrast": Case(around, told="as a whole", loss=of.contrast),
    # data
    "items that draw": Case(dropping, samples=sets.Items),
    "items that draw by themselves": Case(
        dropping, told="draws random numbers", doubted=True, samples=lambda: sets.Items(own=True)
    ),
    "batches that seed and draw": Case(dropping, samples=sets.Seeding),
    "the same in a thread": Case(dropping, ends="fetchers", samples=sets.Fetched),
    "inputs in a dict": Case(of.OfTree, samples=sets.Trees),
    "loss with parameters": Case(around, ends="parameters", loss=of.LossInside()),
}


def data(case: Case) -> Any:
    """A case's data set: by default images and their classes, the same each time."""
    if case.samples is not None:
        return case.samples()
    draw = torch.Generator().manual_seed(0)
    images, labels = sets.samples(draw)
    if case.ignored:  # rows of numbers, for images have a class each
        images = images.flatten(1)
        labels[torch.rand(len(labels), generator=draw) < 0.3] = -100
    return TensorDataset(images, labels)
