"""A case: a small net, and how its numbers are drawn. What a real Caffe makes of it is recorded.

Standard library and numpy of Python 3.9 on: a real Caffe's Python reads it, too.

A new case is a line in one of the tables (layers.py, losses.py, nets.py); make.py then writes its
record, and tests/unit/caffe/test_goldens.py holds firecaffe to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.random import RandomState

Draw = Callable[[RandomState, "tuple[int, ...]"], np.ndarray]
"""An array of that shape."""


class Case(NamedTuple):
    """One net, run forward and backward once."""

    name: str
    net: str
    """Text of a prototxt, its inputs in Input layers."""
    phase: str = "TRAIN"
    draws: Mapping[str, Draw] = {}
    """How an input is drawn, by its name, or a parameter, by LAYER/PLACE; else inputs are drawn
    as `normal`, and parameters half as wide.
    """
    passes: str = "force"
    """What runs. "forward": no backward pass. "backward": as the losses ask for it. "force":
    backward to the inputs, too, which some of Caffe's layers do not take.
    """
    headless: tuple[str, ...] = ()
    """Outputs through which nothing goes back in Caffe. Each other output that is no loss has a
    gradient that is drawn.
    """
    skipped: tuple[str, ...] = ()
    """Blobs whose diff Caffe leaves out."""
    stages: tuple[str, ...] = ()
    stand_in: str = ""
    """What the real Caffe runs instead, where the one that there is lacks a part of a layer: the
    same arithmetic by its other layers. Blobs and layers that the net has not begin with "_".
    """


def normal(random: RandomState, shape: tuple[int, ...]) -> np.ndarray:
    return random.standard_normal(shape)


def positive(random: RandomState, shape: tuple[int, ...]) -> np.ndarray:
    return random.uniform(0.2, 2.0, shape)


def chances(random: RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Probabilities along the axis of channels."""
    values = random.uniform(0.1, 1.0, shape)
    return np.asarray(values / values.sum(axis=1, keepdims=True))


def binary(random: RandomState, shape: tuple[int, ...]) -> np.ndarray:
    return random.randint(0, 2, shape)


def below(limit: int) -> Draw:
    """Whole numbers from 0 on, such as classes."""
    return lambda random, shape: random.randint(0, limit, shape)


def scaled(factor: float, offset: float = 0.0) -> Draw:
    return lambda random, shape: factor * random.standard_normal(shape) + offset


def these(*values: float) -> Draw:
    return lambda random, shape: np.reshape(values, shape)


def drawn(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An input, a parameter or an output's gradient of a case: the same numbers each time."""
    seed = crc32(f"{case.name}/{name}".encode())
    draw = case.draws.get(name, scaled(0.5) if "/" in name else normal)
    return draw(RandomState(seed), shape).astype(np.float32)


def inputs(**shapes: tuple[int, ...]) -> str:
    return "\n".join(
        f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ '
        + " ".join(f"dim: {size}" for size in shape)
        + " } } }"
        for name, shape in shapes.items()
    )


def layer(kind: str, bottoms: str, tops: str, words: str = "", name: str = "") -> str:
    """A layer's text. bottoms, tops: names with spaces between them; name: else that of its
    first top.
    """
    lines = [f'bottom: "{each}"' for each in bottoms.split()]
    lines += [f'top: "{each}"' for each in tops.split()]
    name = name or (tops.split() or [kind.lower()])[0]
    return f'\nlayer {{ name: "{name}" type: "{kind}" {" ".join(lines)} {words} }}'


def batch_normalized(bottom: str, top: str, axes: int = 4, eps: float = 1e-5) -> str:
    """BatchNorm by the batch's own statistics, of other layers: the Caffe that can be had forgot
    to compute them. Checked by hand: y = (x - mean) / sqrt(mean((x - mean)²) + eps).
    """
    order = " ".join(f"order: {axis}" for axis in [1, 0, *range(2, axes)])
    mean = "reduction_param { operation: MEAN axis: 1 }"
    root = f"power_param {{ power: -0.5 shift: {eps} }}"
    return (
        layer("Permute", bottom, "_by_channel", f"permute_param {{ {order} }}")
        + layer("Reduction", "_by_channel", "_mean", mean)
        + layer("Power", "_mean", "_minus_mean", "power_param { scale: -1 }")
        + layer("Bias", f"{bottom} _minus_mean", "_centered")
        + layer("Power", "_centered", "_squares", "power_param { power: 2 }")
        + layer("Permute", "_squares", "_squares_by_channel", f"permute_param {{ {order} }}")
        + layer("Reduction", "_squares_by_channel", "_variance", mean)
        + layer("Power", "_variance", "_root", root)
        + layer("Scale", "_centered _root", top, name="_normalized")
    )


def single(
    name: str,
    kind: str,
    words: str = "",
    *,
    tops: str = "y",
    phase: str = "TRAIN",
    draws: Mapping[str, Draw] = {},
    passes: str = "force",
    headless: tuple[str, ...] = (),
    skipped: tuple[str, ...] = (),
    stand_in: str = "",
    **bottoms: tuple[int, ...],
) -> Case:
    """A net of one layer. bottoms: its inputs in their order, and their shapes."""
    net = inputs(**bottoms) + layer(kind, " ".join(bottoms), tops, words, "layer")
    if stand_in:
        stand_in = inputs(**bottoms) + stand_in
    return Case(name, net, phase, draws, passes, headless, skipped, stand_in=stand_in)
