"""What a server receives of a gradient: torch's own cast of it, in as many bytes as that has."""

from queue import SimpleQueue
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from firecaffe.recipe.config import TrainConfig
from firecaffe.tasks import CLASSIFICATION
from firecaffe.training.forward import Forward
from firecaffe.training.served.coder import Coder, make_coder
from firecaffe.training.served.compute import Contribution
from firecaffe.training.served.memory import Gradient
from firecaffe.training.served.messages import Messages
from firecaffe.training.served.parcel import ALIGNMENT
from firecaffe.transport.lane import Lane

ROW_BYTES = 256 * 2


class Net(nn.Module):
    """Parameters of less than a row, of several, of none; one in channels_last, one not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 24, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.none = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.zeros(7))


class OneWay:
    """Both ends of a lane on which one sends."""

    def __init__(self) -> None:
        self._sent: SimpleQueue[Tensor] = SimpleQueue()
        self.sent_bytes = 0

    def send(self, data: Tensor) -> None:
        self._sent.put(data.clone())
        self.sent_bytes += data.nbytes

    def receive(self, data: Tensor) -> None:
        data.copy_(self._sent.get())


def pushed(coder: Coder, gradients: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """What a server takes these for, and the bytes that it received."""
    net = Net()
    forward = Forward(net, CLASSIFICATION, TrainConfig(8, 4))
    lane = OneWay()
    ends = [
        Messages(cast(Lane, lane), forward, dict(net.named_parameters()), coder) for _ in range(2)
    ]
    brought = Contribution(
        Gradient(gradients, forward.empty_tail()), forward.no_counts(), 0.5, 0.25
    )
    ends[0].send_contribution(brought, asks_to_stop=True)
    found, asks = ends[1].receive_contribution()
    assert asks
    assert (found.data_s, found.compute_s) == (0.5, 0.25)
    return found.gradient.tensors, lane.sent_bytes


def gradients() -> dict[str, Tensor]:
    """Of all sizes, among them what a float16 has no number for."""
    torch.manual_seed(1)
    weight = torch.randn(24, 16, 3, 3).to(memory_format=torch.channels_last)
    bias = torch.logspace(-9, 6, 24)
    bias[3:6] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    return {"conv.weight": weight, "conv.bias": bias, "none": torch.zeros(0)}


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_server_applies_what_a_cast_gives(name: str) -> None:
    dtype, made = getattr(torch, name), gradients()
    coder = make_coder(name)
    expected = {key: each.to(dtype).float() for key, each in made.items()}
    for found in (pushed(coder, made)[0], coder.as_sent(made)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        for key, each in made.items():
            assert found[key].stride() == each.stride()  # on which the bits of a sum may depend


def test_without_a_codec_it_is_the_gradient() -> None:
    made = gradients()
    for found in (pushed(Coder(), made)[0], make_coder("").as_sent(made)):
        torch.testing.assert_close(found, made, rtol=0, atol=0, equal_nan=True)


def test_the_bytes_are_those_of_rows_of_256() -> None:
    sizes = [each.numel() for each in Net().parameters()]
    plain = sum(-(-4 * size // ALIGNMENT) * ALIGNMENT for size in sizes)
    encoded = sum(-(-size // 256) * ROW_BYTES for size in sizes)
    _, as_it_is = pushed(Coder(), gradients())
    _, found = pushed(make_coder("float16"), gradients())
    assert as_it_is - found == plain - encoded > 0
