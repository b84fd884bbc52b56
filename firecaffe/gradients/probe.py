"""The guard: one micro-batch that every rank computes, to see whether all compute the same bits.

Another kind of processor or GPU, or another library, changes bits without any error. So before
the first step, and whenever the ranks are others than before, all ranks compute the gradients of
one and the same micro-batch and compare digests. On the way the probe learns the order in which
backward makes gradients ready, which is the order of the buckets.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import differing_ranks, digest_each, gather_text, text_of_first
from firecaffe.cluster.group import Group
from firecaffe.errors import RecipeError
from firecaffe.gradients.buffers import BufferChanges


@dataclass(frozen=True)
class Probe:
    """The result of the probe micro-batch."""

    digest: str
    """SHA-256 of its loss and of the gradients of the whole model."""
    ready_order: list[int]
    """Indices of this rank's parameters in rank 0's order; those not used come last."""
    deviating_ranks: list[int]
    """Ranks of which a loss, or a gradient, is not that of most ranks that have it."""

    def order_of(self, named: Iterable[str], some: Iterable[str]) -> list[int]:
        """The places of some parameters among these alone, in the order in which backward finishes
        gradients. named: all that the probe was given.
        """
        names, place_of = list(named), {name: at for at, name in enumerate(some)}
        in_order = (names[index] for index in self.ready_order)
        return [place_of[name] for name in in_order if name in place_of]


def run_probe(
    buffers: BufferChanges,
    named: Mapping[str, nn.Parameter],
    backward: Callable[[], Tensor | None],
    world: Group,
    column: Group | None = None,
    beside: Mapping[str, Tensor] | None = None,
) -> Probe:
    """Computes the loss and gradients of one micro-batch and leaves the model as it was.

    Args:
        buffers: Those of the network, which backward's forward begins anew.
        named: This rank's parameters. Those of one name are the same on all ranks that have it.
        backward: Runs backward for the micro-batch. Returns its loss; None if another rank has it.
        column: The ranks that have the same parameters as this one; None: all have.
        beside: What all ranks have computed beside, which is compared and enters no digest.

    Raises: RecipeError if a gradient is sparse.
    """
    ready: list[int] = []
    parameters = list(named.values())
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(_note, ready, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
    ]
    buffers.begin_step()
    value = backward()
    buffers.begin_micro_batch()
    for hook in hooks:
        hook.remove()
    found = {} if value is None else {"loss": value}
    for name, parameter in named.items():
        if parameter.grad is not None:
            if parameter.grad.layout != torch.strided:
                kind = str(parameter.grad.layout).removeprefix("torch.sparse_")
                raise RecipeError(
                    f"the gradient of {name} is sparse ({kind}); expected a dense one: sparse=False"
                )
            found[_of(name)] = parameter.grad
    digests = digest_each(found.items())
    unused = {_of(name): "" for name, parameter in named.items() if parameter.grad is None}
    for parameter in parameters:
        parameter.grad = None
    ready += [index for index in range(len(parameters)) if index not in set(ready)]
    order = json.loads(text_of_first(column or world, json.dumps(ready)))
    stated = {**digests, **unused, **digest_each((beside or {}).items())}
    told = [json.loads(text) for text in gather_text(world, json.dumps(stated))]
    whole = dict(digests)
    for of_rank in told:
        for name, each in of_rank.items():
            if each and name not in (beside or {}):
                whole.setdefault(name, each)
    return Probe(_sha256(json.dumps(sorted(whole.items()))), order, _deviating(told))


def _of(name: str) -> str:
    return f"gradient of {name}"


def _deviating(told: Sequence[Mapping[str, str]]) -> list[int]:
    """The ranks that tell another digest of something than most of those that tell one."""
    found: set[int] = set()
    for name in {name for of_rank in told for name in of_rank}:
        holders = [rank for rank, of_rank in enumerate(told) if name in of_rank]
        digests = [told[rank][name] for rank in holders]
        found |= {holders[place] for place in differing_ranks(digests)}
    return sorted(found)


def _note(ready: list[int], index: int, _: Tensor) -> None:
    ready.append(index)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
