"""A loss scale with a server: gradients overflow, and one worker gets the bits from the log."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from firecaffe import Result
from firecaffe.training.checkpoint import load_checkpoint
from tests.kit.worlds import Trained, checkpoint_of
from tests.ranks.networks import Everything
from tests.ranks.served import MODES, TRAINING, check_replay, recipe


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Steep(Everything):
    """The same values, and gradients that overflow between two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("head", nn.Sequential(Times(2.0**-10), Times(2.0**10), self.head))


STEEP = replace(TRAINING, network=Steep)


def scale_at(result: Result, step: int) -> float:
    return float(load_checkpoint(checkpoint_of(result, step)).numbers["scaler"]["scale"])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("stale", {}),
        ("softsync", {}),
        ("asynchronous", {"compressor": "top_k", "compensate": "gap"}),
    ],
    ids=["stale", "softsync", "top_k"],
)
@pytest.mark.parametrize("servers", [("first", "sharded"), ("sharded", "first")])
def test_a_replay_gives_the_same_bits(
    trained: Trained, name: str, more: dict[str, Any], servers: tuple[str, str]
) -> None:
    """On three, and on two that go on with another server."""
    made, later = (
        recipe({**MODES[name], **more, "server": server}, train={"autocast": "float16"})
        for server in servers
    )
    first = trained(3, made, STEEP)
    check_replay(first, Steep)
    start = checkpoint_of(first, 3)
    second = trained(2, later, STEEP, start)
    check_replay(second, Steep)
    assert 1 <= scale_at(second, 8) <= scale_at(first, 3) < 2**16
