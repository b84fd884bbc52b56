"""The probe: all ranks compute the same micro-batch and compare the bits of their results.

A different processor, GPU or library changes bits without any error. The probe runs before the
first step and whenever the ranks change. It also records the order in which backward finishes
gradients, which is the order of the buckets.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import broadcast_text, differing_ranks, digest_each, gather_json
from firecaffe.cluster.group import Group
from firecaffe.errors import RecipeError
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.inventory.network_state import checksum


@dataclass(frozen=True)
class Probe:
    digest: str
    """SHA-256 of the loss and of the gradients of the whole model."""
    ready_order: list[int]
    """Indices of this rank's parameters in rank 0's order; unused parameters are last."""
    deviating_ranks: list[int]
    """The ranks with a loss or gradient unlike that of most ranks that have it."""
    repeats: bool
    """Whether this rank got the same gradients a second time, if it computed them twice."""

    def order_of(self, named: Iterable[str], some: Iterable[str]) -> list[int]:
        """Order the indices of `some` as backward finishes them. `named`: the probe's names."""
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
    twice: bool = False,
) -> Probe:
    """Compute the loss and gradients of one micro-batch, and restore the model.

    Args:
        backward: Returns the micro-batch's loss; None if another rank has it.
        column: The ranks that have the same parameters as this one; None: all ranks.
        beside: Other tensors of all ranks, which are compared but are not in the digest.
        twice: Compute them again, and compare.

    Raises: RecipeError if a gradient is sparse, or is not whole when backward first finishes it.
    """
    ready: dict[int, Tensor | None] = {}
    parameters = list(named.values())
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(_note, ready, name, index))  # type: ignore[no-untyped-call]
        for index, (name, parameter) in enumerate(named.items())
    ]
    value = _computed(buffers, backward)
    for hook in hooks:
        hook.remove()
    computed = {} if value is None else {"loss": value}
    for name, parameter in named.items():
        if parameter.grad is not None:
            if parameter.grad.layout != torch.strided:
                kind = str(parameter.grad.layout).removeprefix("torch.sparse_")
                raise RecipeError(
                    f"the gradient of {name} is sparse ({kind}); expected a dense one: sparse=False"
                )
            computed[_of(name)] = parameter.grad
    digests = digest_each(computed.items())
    unused = {_of(name): "" for name, parameter in named.items() if parameter.grad is None}
    totals = _take_checksums(parameters)
    ready = dict.fromkeys(ready)  # without the gradients, which are as large as the weights
    if twice:
        _computed(buffers, backward)
    repeats = not twice or _take_checksums(parameters) == totals
    local_order = [*ready, *(index for index in range(len(parameters)) if index not in ready)]
    order = json.loads(broadcast_text(column or world, json.dumps(local_order)))
    stated = {**digests, **unused, **digest_each((beside or {}).items())}
    by_rank = gather_json(world, stated)
    whole = dict(digests)
    for of_rank in by_rank:
        for name, digest_text in of_rank.items():
            if digest_text and name not in (beside or {}):
                whole.setdefault(name, digest_text)
    return Probe(_sha256(json.dumps(sorted(whole.items()))), order, _deviating(by_rank), repeats)


def _computed(buffers: BufferChanges, backward: Callable[[], Tensor | None]) -> Tensor | None:
    buffers.begin_step()
    value = backward()
    buffers.begin_micro_batch()
    return value


def _take_checksums(parameters: Sequence[nn.Parameter]) -> list[int | None]:
    totals = [None if p.grad is None else checksum(p.grad) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return totals


def _of(name: str) -> str:
    return f"gradient of {name}"


def _deviating(by_rank: Sequence[Mapping[str, str]]) -> list[int]:
    deviating: set[int] = set()
    for name in {name for of_rank in by_rank for name in of_rank}:
        holders = [rank for rank, of_rank in enumerate(by_rank) if name in of_rank]
        digests = [by_rank[rank][name] for rank in holders]
        deviating |= {holders[place] for place in differing_ranks(digests)}
    return sorted(deviating)


def _note(ready: dict[int, Tensor | None], name: str, index: int, parameter: Tensor) -> None:
    # Forward may compute gradients itself and drop them before backward; only the last count.
    before = ready.pop(index, None)
    if before is not None and before is parameter.grad:
        raise RecipeError(
            f"the gradient of {name} goes on growing after backward has finished it, when it may "
            "have been sent; torch.utils.checkpoint needs use_reentrant=False"
        )
    ready[index] = parameter.grad


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
