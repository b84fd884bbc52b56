"""What a server receives of a gradient: torch's own cast of it, in as many bytes as that has; or
with what was kept back of those before.
"""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from firecaffe.errors import CheckpointError
from firecaffe.gradients.compressors import FIXED_LENGTH
from firecaffe.gradients.compressors.int8 import INT8
from firecaffe.recipe.sections import TrainConfig
from firecaffe.tasks import CLASSIFICATION
from firecaffe.training.forward import Forward
from firecaffe.training.modes.served.coder import Coder, FeedbackEncoder, make_coder
from firecaffe.training.modes.served.messages import WORK, Head, Messages
from firecaffe.training.modes.served.server_memory import ALIGNMENT, Gradient
from firecaffe.training.modes.served.work_gradient import Contribution
from firecaffe.training.tensor_file import InMemory
from firecaffe.transport.lane import Lane


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


FORWARD = Forward(Net(), CLASSIFICATION, TrainConfig(8, 4))
NAMED = dict(FORWARD.model.named_parameters())


def messages_of(coder: Coder, lane: OneWay) -> Messages:
    return Messages(cast(Lane, lane), FORWARD, NAMED, coder)


def pushed(coder: Coder, gradients: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """What a server takes these for, and the bytes that it received."""
    lane = OneWay()
    learner, server = messages_of(coder, lane), messages_of(coder, lane)
    tail, counts = FORWARD.empty_tail(), FORWARD.zero_counts()
    contribution = Contribution(Gradient(gradients, tail), counts, 0.5, 0.25)
    learner.send_contribution(3, contribution, asks_to_stop=True)
    found, asks = server.receive_contribution()
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


@pytest.mark.parametrize("name", ["", "float16", "bfloat16"])
def test_a_server_applies_what_a_cast_gives(name: str) -> None:
    made, coder = gradients(), make_coder(name, {})
    dtype = getattr(torch, name or "float32")
    expected = {key: each.to(dtype).float() for key, each in made.items()}
    words: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    for sent in (pushed(coder, made)[0], coder.as_received(3, made)):
        # The bits of a sum may depend on strides.
        torch.testing.assert_close(sent, expected, **words, check_stride=True)


BYTES: dict[str, Callable[[int], int]] = {
    "": lambda size: 4 * size,
    "float16": lambda size: 2 * 256 * -(-size // 256),
    "bfloat16": lambda size: 2 * 256 * -(-size // 256),
    "int8": lambda size: 260 * -(-size // 256),
    "one_bit": lambda size: 8 + -(-size // 8),
    "top_k": lambda size: 8 * max(1, size // 64),
}
"""Of a parameter that has elements; see docs/explanation/synchrony.md."""


@pytest.mark.parametrize("name", FIXED_LENGTH)
def test_the_bytes_are_those_of_the_codec(name: str) -> None:
    def of(codec: str) -> int:
        sizes = [each.numel() for each in NAMED.values() if each.numel()]
        return sum(-(-BYTES[codec](size) // ALIGNMENT) * ALIGNMENT for size in sizes)

    _, as_it_is = pushed(Coder(), of_steps(1)[0])
    _, found = pushed(make_coder(name, {}), of_steps(1)[0])
    assert as_it_is - found == of("") - of(name) > 0


def of_steps(count: int, seed: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"conv.weight": (24, 16, 3, 3), "conv.bias": (24,)}
    steps = range(count)
    return [{n: torch.randn(sizes[n], generator=generator) for n in sizes} for _ in steps]


REMEMBER = ["int8", "one_bit", "top_k"]


@pytest.mark.parametrize("name", REMEMBER)
def test_what_was_not_sent_is_sent_later(name: str) -> None:
    """All that was sent, and what is kept, are all gradients: of each learner by itself."""
    coder = make_coder(name, {})
    assert isinstance(coder, FeedbackEncoder)
    given = {learner: of_steps(30, seed=learner) for learner in (1, 4)}
    sent: dict[str, Tensor] = {}
    for step in range(30):
        for learner, steps in given.items():
            for key, each in coder.as_received(learner, steps[step]).items():
                path = f"{learner}.{key}"
                sent[path] = sent.get(path, torch.zeros(())) + each
    kept = coder.parts()
    assert kept.keys() == sent.keys()
    for path, total in sent.items():
        number, _, key = path.partition(".")
        whole = torch.stack([each[key].double() for each in given[int(number)]]).sum(0)
        rest = kept[path].tensor.view_as(total)
        torch.testing.assert_close((total + rest).double(), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", REMEMBER)
def test_a_push_that_does_not_count_leaves_no_trace(name: str) -> None:
    """A learner hears of it with its next work."""
    first, dropped, last = of_steps(3)
    there, here = make_coder(name, {}), make_coder(name, {})
    here.as_received(3, first)
    pushed(there, first)
    pushed(there, dropped)
    told = messages_of(there, OneWay())
    told.send_head(Head(WORK, 3, is_dropped=True))
    told.receive_head()
    sent = pushed(there, last)[0]
    torch.testing.assert_close(sent, here.as_received(3, last), rtol=0, atol=0)
    here.forget(3)  # who is gone has kept nothing
    fresh = make_coder(name, {}).as_received(3, first)
    torch.testing.assert_close(here.as_received(3, first), fresh, rtol=0, atol=0)


@pytest.mark.parametrize("name", REMEMBER)
def test_a_gradient_that_overflows_leaves_no_trace(name: str) -> None:
    """Its update is skipped, so that of none of its parameters a part was applied."""
    first, last = of_steps(2)
    coder, other = make_coder(name, {}), make_coder(name, {})
    for made in (coder, other):
        made.as_received(3, first)
    broken = {key: tensor * 2 for key, tensor in first.items()}
    next(iter(broken.values())).view(-1)[0] = torch.inf
    coder.as_received(3, broken)
    torch.testing.assert_close(
        coder.as_received(3, last), other.as_received(3, last), rtol=0, atol=0
    )


def test_another_network_s_memory_is_refused() -> None:
    coder = make_coder("int8", {})
    assert isinstance(coder, FeedbackEncoder)
    coder.as_received(3, of_steps(1)[0])
    stored = {name: each.tensor for name, each in coder.parts().items()}
    again = FeedbackEncoder(INT8, NAMED)
    again.load(InMemory(stored))
    assert again.parts().keys() == stored.keys()
    for path in ("3.other", "x.conv.bias", "3.none"):
        with pytest.raises(CheckpointError, match=path):
            again.load(InMemory({path: stored["3.conv.bias"]}))
