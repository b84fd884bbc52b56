"""What firecaffe makes of a case, beside what the real Caffe made of it."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from firecaffe.caffe import text
from firecaffe.caffe.layers import LAYERS
from firecaffe.caffe.net import Net, blobs_of
from tools.caffe_goldens import layers, losses, nets
from tools.caffe_goldens.cases import Case
from tools.caffe_goldens.record import Record

FAMILIES = {**layers.FAMILIES, **losses.FAMILIES, **nets.FAMILIES}


class Pair(NamedTuple):
    what: str
    ours: Tensor
    caffes: np.ndarray


def filled(case: Case, record: Record) -> Net:
    """The net with the record's parameters."""
    net = Net(text.parse(case.net), phase=case.phase, stages=case.stages)
    held: dict[str, list[Tensor]] = {}
    for name, values in record.kind("param").items():
        held.setdefault(name.rpartition("/")[0], []).append(torch.tensor(values))
    loaded = net.load(held)
    assert not loaded.unused
    return net


def passed(net: Net, case: Case, record: Record) -> Iterator[Pair]:
    """Every blob after a forward pass; then its gradient, and that of every parameter, unless
    Caffe does not give it: of one with lr_mult 0 it is left at 0, if none is forced.
    """
    blobs = record.kind("blob")
    values = [torch.tensor(blobs[name]) for name in net.inputs]
    for value in values:
        value.requires_grad_(case.passes == "force")
    outputs = net(*values)
    for name, expected in blobs.items():
        yield Pair(f"blob {name}", net.blobs[name], expected)
    if case.passes == "forward":
        return
    # Of a blob that is written more than once, Caffe has the gradient of what stood there first.
    written = Counter(top for call in net._calls for top in call.step.tops)
    kept = {name: net.blobs[name] for name in blobs if written[name] < 2}
    for blob in kept.values():
        if blob.requires_grad:
            blob.retain_grad()
    heads = record.kind("head")
    torch.autograd.backward(_total(net, outputs, heads))
    for name, expected in record.kind("diff").items():
        is_given = name in heads or (case.passes == "backward" and name in net.inputs)
        if name in kept and not is_given:
            yield Pair(f"diff {name}", _gradient(kept[name]), expected)
    grads = record.kind("grad")
    still = set() if case.passes == "force" else _still(net)
    for name, tensor in parameters(net).items():
        if id(tensor) in still:
            assert not grads[name].any()
        elif name in grads:
            yield Pair(f"grad {name}", _gradient(tensor).reshape(grads[name].shape), grads[name])


def parameters(net: Net) -> dict[str, Tensor]:
    """The blobs of the layers, by layer and place."""
    found = {}
    for call in net._calls:
        module = net.layers[call.step.name]
        for place, tensor in enumerate(blobs_of(LAYERS[call.step.type], module).values()):
            found[f"{call.step.name}/{place}"] = tensor
    return found


def _still(net: Net) -> set[int]:
    """The parameters with lr_mult 0, by id."""
    held = dict(net.named_parameters())
    return {id(held[name]) for name, each in net.multipliers.items() if not each.lr}


def _total(net: Net, outputs: dict[str, Tensor], heads: dict[str, np.ndarray]) -> Tensor:
    """What the record's gradients are the gradients of."""
    parts = [
        (outputs[name] * torch.tensor(head)).sum()
        for name, head in heads.items()
        if outputs[name].requires_grad
    ]
    parts += [
        outputs[name].sum() * weight for name, weight in net.losses.items() if name not in heads
    ]
    return torch.stack([torch.zeros((), requires_grad=True), *parts]).sum()


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
