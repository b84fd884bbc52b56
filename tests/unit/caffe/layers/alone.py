"""A net of one layer, for what the layer makes of its bottoms."""

import torch
from torch import Tensor, nn

from firecaffe.caffe import Net
from firecaffe.caffe.text import parse


def net_of(
    type_: str, words: str = "", *shapes: tuple[int, ...], tops: int = 1, phase: str = "TEST"
) -> Net:
    """A net that is such a layer, called "l", over bottoms of these shapes, "x0", "x1" …, to tops
    "y0", "y1" …
    """
    text = ""
    for place, shape in enumerate(shapes):
        dims = " ".join(f"dim: {size}" for size in shape)
        text += (
            f'layer {{ name: "in{place}" type: "Input" top: "x{place}" '
            f"input_param {{ shape {{ {dims} }} }} }}\n"
        )
    bottoms = " ".join(f'bottom: "x{place}"' for place in range(len(shapes)))
    names = " ".join(f'top: "y{place}"' for place in range(tops))
    text += f'layer {{ name: "l" type: "{type_}" {bottoms} {names} {words} }}\n'
    return Net(parse(text), phase=phase)


def layer_of(type_: str, words: str = "", *shapes: tuple[int, ...], tops: int = 1) -> nn.Module:
    return net_of(type_, words, *shapes, tops=tops).layers["l"]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
