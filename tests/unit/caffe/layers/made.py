"""A layer made from its text, for bottoms of some shapes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from firecaffe.caffe import text
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.spec import Shape, Spec
from firecaffe.caffe.message import CaffeError


def spec_of(words: str, bottoms: Sequence[Shape]) -> Spec:
    """words: `layer { … }`."""
    layer = text.parse(words, "net.prototxt").message("layer")
    kind = LAYERS[layer.text("type")]
    return Spec(
        layer.text("name"),
        layer.text("type"),
        layer,
        layer.message(kind.param),
        bottoms,
        len(layer.texts("top")),
        "TRAIN",
    )


def module_of(words: str, *bottoms: Shape) -> nn.Module:
    spec = spec_of(words, bottoms)
    module = LAYERS[spec.type].make(spec)
    spec.layer.ignore("bottom")
    assert not list(spec.layer.unread())
    return module


def layer(kind: str, words: str = "", tops: int = 1) -> str:
    names = " ".join(f'top: "t{place}"' for place in range(tops))
    return f'layer {{ name: "it" type: "{kind}" {names} {words} }}'


def refusal(words: str, *bottoms: Shape) -> str:
    """The line that a layer is refused with."""
    try:
        module_of(words, *bottoms)
    except CaffeError as error:
        return str(error)
    raise AssertionError("the layer was made")


def run(module: nn.Module, *bottoms: Tensor) -> tuple[Tensor, ...]:
    result = module(*bottoms)
    return result if isinstance(result, tuple) else (result,)


def on_meta(words: str, *bottoms: Shape) -> list[Shape]:
    """The shapes of the tops, as a net finds them."""
    with torch.device("meta"):
        module = module_of(words, *bottoms)
        return [tuple(top.shape) for top in run(module, *map(torch.empty, bottoms))]
