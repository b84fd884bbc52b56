"""Norms of tensors that the ranks of a row hold in parts.

The norm of a tensor in parts is made of its parts' norms: the root of the sum of their squares, in
double precision and in the order of parts. One rank that holds all parts does alike, so the number
of ranks changes no bit. What a rank does not know it tells as UNUSED, which is less than any norm,
so nothing is rounded on the way.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from firecaffe.cluster.agree import finish
from firecaffe.cluster.group import Group
from firecaffe.solvers.norms import own_norms
from firecaffe.training.parallel.pieces import Names, Source

UNUSED = -1.0
"""The norm of what is not there."""


class RowNorms:
    """The norms of a network's tensors; see `solvers.norms.Norms`. All ranks of the row call it
    alike.
    """

    def __init__(
        self,
        row: Group,
        named: Mapping[str, nn.Parameter],
        names: Names,
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """named: this rank's parameters, by its own names. dtypes: of the whole tensors, in the
        network's order.
        """
        self._row, self._dtypes, self._parameters = row, dtypes, list(named.values())
        num_parts = [1] * len(names.places)
        sources: dict[Tensor, Source] = {}
        for name, each in named.items():
            source, _ = names.source(name)
            sources[each] = source
            num_parts[names.places[source.whole]] = max(1, len(source.cut) - 1)
        ends = torch.tensor([0, *num_parts]).cumsum(0).tolist()
        self._spans = [range(*span) for span in pairwise(ends)]
        """Of each whole tensor, the places of its parts among all norms that are told."""
        self._span_of = {
            each: self._spans[names.places[source.whole]] for each, source in sources.items()
        }
        self._place_of = {
            each: self._span_of[each].start + (source.part if source.cut else 0)
            for each, source in sources.items()
        }

    def __call__(
        self, weights: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]
    ) -> Sequence[Sequence[Tensor]]:
        """Raises: PeerLostError."""
        own = own_norms(weights, lists)
        if all(len(self._span_of[each]) == 1 for each in weights):
            return own  # the same on all ranks, or of a tensor that one rank has
        return [
            [
                norm if len(span) == 1 else _of_parts(told[span.start : span.stop]).to(norm)
                for norm, span in zip(norms, map(self._span_of.__getitem__, weights), strict=True)
            ]
            for norms, told in zip(own, self._told(weights, own), strict=True)
        ]

    def of_gradient(self) -> Tensor:
        """The norm of the whole network's gradient, shape (). Raises: PeerLostError."""
        used = {each: each.grad for each in self._parameters if each.grad is not None}
        own = torch._foreach_norm(list(used.values())) if used else ()
        [told] = self._told(list(used), [own])
        norms = [_of_parts(told[span.start : span.stop]) for span in self._spans]
        return total(norms, self._dtypes).to(self._row.device)

    def _told(self, weights: Sequence[Tensor], norms: Sequence[Sequence[Tensor]]) -> Tensor:
        """The norms of all parts, shape (lists, parts)."""
        told = torch.full((len(norms), self._spans[-1].stop), UNUSED, dtype=torch.float64)
        places = [self._place_of[each] for each in weights]
        for row, own in zip(told, norms, strict=True):
            if places:  # of a network of which nothing is trained here
                row[places] = torch.stack([each.double() for each in own]).cpu()
        if self._row.group is not None:
            most = partial(dist.all_reduce, told, dist.ReduceOp.MAX, group=self._row.group)
            finish(self._row, most)
        return told


def _of_parts(norms: Tensor) -> Tensor:
    """The norm of a tensor by its parts'; UNUSED if it is not there."""
    if len(norms) == 1 or norms[0] == UNUSED:
        return norms[0]
    return norms.square().sum().sqrt()


def total(norms: Iterable[Tensor], dtypes: Iterable[torch.dtype]) -> Tensor:
    """The norm of all tensors by theirs, in the network's order, as `clip_grad_norm_` has it of the
    tensors themselves. norms: float64, shape () each. dtypes: the tensors'.
    """
    of_all = zip(norms, dtypes, strict=True)
    used = [norm.to(dtype) for norm, dtype in of_all if norm != UNUSED]
    return nn.utils.get_total_norm(used, foreach=True)
