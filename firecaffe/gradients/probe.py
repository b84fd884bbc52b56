"""The guard: one micro-batch that every rank computes, to see whether all compute the same bits.

Another kind of processor or GPU, or another library, changes bits without any error. So before
the first step, and whenever the ranks are others than before, all ranks compute the gradients of
one and the same micro-batch and compare digests. On the way the probe learns the order in which
backward makes gradients ready, which is the order of the buckets.
"""

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import ranks_that_differ, text_of_first
from firecaffe.cluster.digest import digest
from firecaffe.cluster.group import Group
from firecaffe.gradients.buffers import BufferChanges


@dataclass(frozen=True)
class Probe:
    """The result of the probe micro-batch."""

    digest: str
    """SHA-256 of its loss and gradients on this rank."""
    ready_order: list[int]
    """Indices of the parameters in rank 0's order; those that the probe did not use come last."""
    deviating_ranks: list[int]
    """Ranks whose digest is not that of most ranks."""


def run_probe(
    model: nn.Module,
    parameters: list[nn.Parameter],
    loss: Callable[[], Tensor],
    world: Group,
    left_out: Container[nn.Parameter] = (),
) -> Probe:
    """Computes the loss and gradients of one micro-batch and leaves the model as it was. left_out:
    parameters that do not enter the digest, for other ranks have others.
    """
    ready: list[int] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(_note, ready, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    buffers = BufferChanges(model)
    buffers.begin_step()
    value = loss()
    torch.autograd.backward(value)
    buffers.begin_micro_batch()
    for hook in hooks:
        hook.remove()
    compared = [each for each in parameters if each not in left_out] if left_out else parameters
    gradients = [(str(index), p.grad) for index, p in enumerate(compared) if p.grad is not None]
    own = digest([("loss", value), *gradients])
    for parameter in parameters:
        parameter.grad = None
    ready += [index for index in range(len(parameters)) if index not in set(ready)]
    different = [world.in_world(rank) for rank in ranks_that_differ(world, own)]
    order = json.loads(text_of_first(world, json.dumps(ready)))
    return Probe(own, order, different)


def _note(ready: list[int], index: int, _: Tensor) -> None:
    ready.append(index)
