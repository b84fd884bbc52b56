"""Stages one after the other in one process, as if each were on a rank; narrow networks, and one
with what a cut has to get right; and a pipeline's step without messages, in exact time, against
which formulas are checked.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.models.known_networks import build_model
from firecaffe.parallel.stage_run import Arrivals, root_of
from firecaffe.parallel.stage_values import check_no_alias, pack, room_for, tensors_in, unpack
from firecaffe.parallel.stages import Action, Stage, cut_stages

NARROW = 8
"""Widths are divided by it."""


def narrow(name: str, num_classes: int = 5) -> nn.Module:
    """One of our networks with an eighth of its widths; LeNet as it is."""
    if name == "lenet":
        return build_model(name)
    with torch.device("meta"):
        model = build_model(name, num_classes)
    for place, layer in list(model.named_modules()):
        if isinstance(layer, nn.Conv2d):
            shape = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups
            inputs, outputs = _less(layer.in_channels, 3), _less(layer.out_channels, num_classes)
            made: Any = nn.Conv2d
            smaller: nn.Module = made(inputs, outputs, *shape, layer.bias is not None)
        elif isinstance(layer, nn.Linear):
            outputs = _less(layer.out_features, num_classes)
            smaller = nn.Linear(layer.in_features // NARROW, outputs)
        elif isinstance(layer, nn.BatchNorm2d):
            smaller = nn.BatchNorm2d(layer.num_features // NARROW)
        else:
            continue
        model.set_submodule(place, smaller)
    return model


def _less(width: int, kept: int) -> int:
    return width if width == kept else width // NARROW


def sent(value: Any) -> tuple[Any, list[Tensor]]:
    """A value, as it is after it was sent; and those of its tensors that want gradients."""
    packed = pack(value)
    runs = room_for(packed.outline)
    for run, given in zip(runs, packed.runs, strict=True):
        run.copy_(given)
    return unpack(packed.outline, runs, torch.device("cpu"))


def run_in_stages(stages: Sequence[Stage], x: Any, loss_of: Callable[[Any], Tensor]) -> Tensor:
    values: tuple[Any, ...] = (x,)
    boundaries = []
    for stage in stages[:-1]:
        given = stage.module(*values)
        ends = tensors_in(given)
        check_no_alias(ends)
        values, wanted = sent(given)
        boundaries.append(([each for each in ends if each.requires_grad], Arrivals(wanted)))
    loss = loss_of(stages[-1].module(*values))
    root: Tensor | None = loss
    for ends, arrivals in reversed(boundaries):
        assert root is not None
        torch.autograd.backward(root)
        gradients, _ = sent(arrivals.gradients)
        root = root_of(ends, gradients)
    if root is not None:
        torch.autograd.backward(root)
    return loss.detach()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def check_same_bits(
    network: nn.Module, names: list[str], x: Any, loss_of: Callable[[Any], Tensor]
) -> None:
    """Compares a network with a copy of it that is cut into stages."""
    whole, copied = copy.deepcopy(network), copy.deepcopy(network)
    stages = cut_stages(copied, names)
    assert [stage.number for stage in stages] == list(range(len(names) + 1))
    torch.manual_seed(11)
    expected = loss_of(whole(x))
    torch.autograd.backward(expected)
    drawn = torch.get_rng_state()
    torch.manual_seed(11)
    found = run_in_stages(stages, x, loss_of)
    assert torch.equal(found, expected.detach())
    assert torch.equal(torch.get_rng_state(), drawn)
    expected_gradients, found_gradients = gradients_of(whole), gradients_of(copied)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert torch.equal(found_gradients[name], gradient), name
        assert found_gradients[name].stride() == gradient.stride(), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(copied.get_buffer(name), buffer), name


class Gain(nn.Module):
    """Needs a buffer in backward as this forward has left it."""

    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.gain.lerp_(1 + x.detach().float().mean(), 0.5)
        return x * self.gain


class Odd(nn.Module):
    """Changes in place behind a cut, a value that several stages need, a head in the middle, a size
    as a number, a layout of memory; a parameter, a buffer and a tensor beside modules.
    """

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(6 * 64, 4))
        self.act = nn.ReLU(inplace=True)
        conv = nn.Conv2d(6, 6, 3, padding=1)
        self.middle = nn.Sequential(nn.Dropout(0.3), conv, nn.Tanh(), Gain())
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.register_buffer("calls", torch.zeros(()))
        self.last = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.4, inplace=True), nn.Linear(8, 4))

    def forward(self, x: dict[str, Tensor]) -> Any:
        image = x["image"]
        self.calls.add_(1)
        y = self.first(image)
        side = self.head(y) if self.training else None
        y = self.act(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        z = self.middle(y) * torch.ones(6).view(6, 1, 1)
        z = z * self.scale.view(6, 1, 1) + y
        z = self.last(torch.cat([z, y], 1).reshape(image.shape[0], -1))
        return {"out": z + x["image"].mean(), "side": side}


def odd_loss(outputs: Any) -> Tensor:
    labels = torch.arange(len(outputs["out"])) % 4
    loss = F.cross_entropy(outputs["out"], labels)
    if outputs["side"] is not None:
        loss = loss + 0.3 * F.cross_entropy(outputs["side"], labels)
    return loss


def odd() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    x = {"image": torch.randn(3, 3, 8, 8)}
    network = Odd()
    network(x)  # makes the lazy layer
    return network, x


@dataclass(frozen=True)
class Simulated:
    length_s: Fraction
    busy_s: tuple[Fraction, ...]

    @property
    def idle_share(self) -> Fraction:
        return 1 - sum(self.busy_s, Fraction()) / (self.length_s * len(self.busy_s))


def simulate(
    stages: Sequence[Sequence[Action]],
    forward_s: Sequence[Fraction | int],
    backward_s: Sequence[Fraction | int],
) -> Simulated:
    """Simulate a step without message times. Raises: ValueError if stages wait forever."""
    ends: dict[tuple[int, Action], Fraction] = {}
    now = [Fraction()] * len(stages)
    left = [list(reversed(actions)) for actions in stages]
    while any(left):
        moved = False
        for stage, actions in enumerate(left):
            while actions and (ready := _ready(stage, actions[-1], len(stages), ends)) is not None:
                action = actions.pop()
                taken = (forward_s if action.is_forward else backward_s)[stage]
                now[stage] = max(now[stage], ready) + taken
                ends[stage, action] = now[stage]
                moved = True
        if not moved:
            stuck = next(stage for stage, actions in enumerate(left) if actions)
            raise ValueError(f"stage {stuck} waits forever for {left[stuck][-1]}")
    busy = tuple(
        sum(
            (
                Fraction((forward_s if action.is_forward else backward_s)[stage])
                for action in actions
            ),
            Fraction(),
        )
        for stage, actions in enumerate(stages)
    )
    return Simulated(max(now), busy)


def _ready(
    stage: int, action: Action, num_stages: int, ends: dict[tuple[int, Action], Fraction]
) -> Fraction | None:
    if action.is_forward:
        return ends.get((stage - 1, action)) if stage else Fraction()
    if stage == num_stages - 1:
        return ends.get((stage, Action(True, action.micro_batch)))
    return ends.get((stage + 1, action))
