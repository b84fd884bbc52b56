"""The guard: one micro-batch that every rank computes, to see whether all compute the same bits.

Another kind of processor or GPU, or another library, changes bits without any error. So before
the first step, and whenever the ranks are others than before, all ranks compute the gradients of
one and the same micro-batch and compare digests. On the way the probe learns the order in which
backward makes gradients ready, which is the order of the buckets.
"""

import hashlib
import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from firecaffe.cluster.agree import gather_text, ranks_that_differ, text_of_first
from firecaffe.cluster.digest import digest_each
from firecaffe.cluster.group import Group
from firecaffe.gradients.buffers import BufferChanges


@dataclass(frozen=True)
class Probe:
    """The result of the probe micro-batch."""

    digest: str
    """SHA-256 of its loss and of the gradients of the whole model."""
    ready_order: list[int]
    """Indices of this rank's parameters in rank 0's order; those not used come last."""
    deviating_ranks: list[int]
    """Ranks whose digest is not that of most ranks."""


def run_probe(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    backward: Callable[[], Tensor | None],
    world: Group,
    left_out: Container[nn.Parameter] = (),
    row: Group | None = None,
) -> Probe:
    """Computes the loss and gradients of one micro-batch and leaves the model as it was.

    Args:
        backward: Runs backward for the micro-batch. Returns its loss; None if another rank of the
            row has it.
        left_out: Parameters that do not enter the digest, for other ranks have others.
        row: The ranks that have this model between them, each with its parameters; None: this rank
            has all.
    """
    ready: list[int] = []
    parameters = list(named.values())
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(_note, ready, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    buffers = BufferChanges(model)
    buffers.begin_step()
    value = backward()
    buffers.begin_micro_batch()
    for hook in hooks:
        hook.remove()
    found = {} if value is None else {"loss": value}
    for name, parameter in named.items():
        if parameter.grad is not None and parameter not in left_out:
            found[f"gradient of {name}"] = parameter.grad
    digests = digest_each(found.items())
    for parameter in parameters:
        parameter.grad = None
    ready += [index for index in range(len(parameters)) if index not in set(ready)]
    own = json.dumps(digests)
    different = [world.in_world(rank) for rank in ranks_that_differ(world, _sha256(own))]
    order = json.loads(text_of_first(world, json.dumps(ready)))
    of_model = [own] if row is None else gather_text(row, own)
    whole = sorted(each for text in of_model for each in json.loads(text).items())
    return Probe(_sha256(json.dumps(whole)), order, different)


def _note(ready: list[int], index: int, _: Tensor) -> None:
    ready.append(index)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
