"""A layer made from its text, alone or in a net, for bottoms of some shapes."""

import torch
from torch import Tensor, nn

from firecaffe.caffe import Net, text
from firecaffe.caffe.graph import GraphStep
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.layers.spec import Shape
from firecaffe.caffe.message import CaffeError
from tests.kit.models_refused import refused
from tools.caffe_goldens.cases import inputs


def layer(kind: str, words: str = "", tops: int = 1) -> str:
    names = " ".join(f'top: "y{place}"' for place in range(tops))
    return f'layer {{ name: "it" type: "{kind}" {names} {words} }}'


def own(kind: str, words: str) -> str:
    """The words as the message of that kind of layer."""
    return f"{LAYERS[kind].param} {{ {words} }}" if words else ""


def module_of(words: str, *bottoms: Shape) -> nn.Module:
    """words: `layer { … }`."""
    layer = text.parse(words, "net.prototxt").message("layer")
    kind, tops = layer.text("type"), (*layer.texts("top"),)
    step = GraphStep(layer.text("name"), kind, layer, LAYERS[kind], (), tops, (), False)
    module = step.kind.make(step.spec(bottoms, "TRAIN"))
    layer.ignore("bottom", "loss_weight")
    assert not list(layer.unread())
    return module


def layer_of(kind: str, words: str, *bottoms: Shape) -> nn.Module:
    return module_of(layer(kind, words), *bottoms)


def net_of(words: str, *bottoms: Shape) -> Net:
    """The layer over inputs x0, x1 …, in one line."""
    shapes = {f"x{place}": tuple(shape) for place, shape in enumerate(bottoms)}
    names = " ".join(f'bottom: "{name}"' for name in shapes)
    line = inputs(**shapes).replace("\n", " ")
    return Net(text.parse(f"{line} {words[:-1]} {names} }}", "net.prototxt"))


def refusal(words: str, *bottoms: Shape) -> str:
    """The line that a net with such a layer is refused with."""
    with refused(CaffeError, []) as caught:
        net_of(words, *bottoms)
    return str(caught.value)


def run(module: nn.Module, *bottoms: Tensor) -> tuple[Tensor, ...]:
    result = module(*bottoms)
    return result if isinstance(result, tuple) else (result,)


def on_meta(words: str, *bottoms: Shape) -> list[Shape]:
    """The shapes of the tops, as a net finds them."""
    with torch.device("meta"):
        module = module_of(words, *bottoms)
        return [tuple(top.shape) for top in run(module, *map(torch.empty, bottoms))]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
