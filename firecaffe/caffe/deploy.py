"""Write a trained network for Caffe: a prototxt for inference, and the weights by layer.

It has an Input layer instead of the data layers, the layers of TEST that lead to the prediction,
and a Softmax if the loss had one.
"""

from typing import NamedTuple

from torch import nn

from firecaffe.caffe.message import CaffeError, Field, Message
from firecaffe.caffe.parameters import blobs_of
from firecaffe.caffe.trained import Trained
from firecaffe.caffe.weights import Layer

SOFTMAX_LOSS = "SoftmaxWithLoss"
PROBABILITIES = "prob"

OF_TRAINING = ("include", "exclude", "phase", "loss_weight", "propagate_down")


class Deployed(NamedTuple):
    net: Message
    layers: list[Layer]
    output: str
    softmax_axis: int | None
    """The axis of the added softmax; None if there is none."""


def deployed(network: Trained) -> Deployed:
    """Build both files' contents. Raises CaffeError if a layer is not as in its prototxt."""
    answer = network.answering()
    fields = [Field("name", answer.name, 0)] if answer.name else []
    shape = Message([Field("dim", each, 0) for each in answer.shape])
    param = Field("input_param", Message([Field("shape", shape, 0)]), 0)
    fields.append(_layer(answer.source, "Input", [], [answer.source], param))
    layers = []
    for call in answer.calls:
        kept = [each for each in call.step.layer.fields if each.name not in OF_TRAINING]
        fields.append(Field("layer", Message(kept), 0))
        module = network.get_submodule(call.module)
        blobs = blobs_of(call.step.kind, module)
        _check_whole(call.step.name, module, bool(blobs))
        if blobs:
            arrays = [each.detach().cpu().float().numpy() for each in blobs.values()]
            layers.append(Layer(call.step.layer.text("name"), call.step.type, arrays))
    output, axis = answer.blob, None
    if answer.loss is not None and answer.loss.type == SOFTMAX_LOSS:
        axis = answer.loss.layer.message("softmax_param").integer("axis", 1)
        output = PROBABILITIES
        while any(output in (each.step.name, *each.step.tops) for each in answer.calls):
            output += "_"
        param = Field("softmax_param", Message([Field("axis", axis, 0)]), 0)
        fields.append(_layer(output, "Softmax", [answer.blob], [output], param))
    return Deployed(Message(fields), layers, output, axis)


def _layer(name: str, kind: str, bottoms: list[str], tops: list[str], param: Field) -> Field:
    words = [Field("name", name, 0), Field("type", kind, 0)]
    words += [Field("bottom", each, 0) for each in bottoms]
    words += [Field("top", each, 0) for each in tops]
    return Field("layer", Message([*words, param]), 0)


def _check_whole(name: str, module: nn.Module, has_blobs: bool) -> None:
    if not has_blobs and next(module.parameters(), None) is not None:
        raise CaffeError(
            f"layer {name!r} is no longer as its prototxt says (model.low_rank makes two of it); "
            "Caffe has no such layer"
        )
