"""Agreement about a step's results among the ranks that hold one model.

A rank that knows all sums (`Alone`) asks no other rank. Ranks that hold parts of layers, a stage or
a shard (`Among`) agree on all that a single rank would decide by: the sums, which gradients are
finite, their norms, and whether the loss scale was too large. For this they sum in double precision
over each of their groups. If several ranks know a value, one sends it and the others send 0. So
nothing is rounded, and a NaN is passed on.

The norm of a tensor in parts is the root of the sum of its parts' squared norms, in their order. A
rank that holds all parts computes it the same way, so the number of ranks changes no bit.

With float16, all ranks of a model skip a step if one has a non-finite gradient (`LossScale`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from firecaffe.cluster.agree import finish, gather_json
from firecaffe.cluster.group import Group
from firecaffe.solvers.update_rules import Norms, own_norms
from firecaffe.transport.queue import Queue


class UpdatingScaler(torch.amp.GradScaler):
    """Torch's scaler, and whether it has let any update through since training began."""

    has_updated = False


@dataclass(frozen=True)
class ScalerNumbers:
    """The scaler's numbers in a checkpoint. Replicas keep only torch's, which a digest covers."""

    scaler: UpdatingScaler

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scaler.state_dict()
        return {**state, "has_updated": self.scaler.has_updated} if state else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
        self.scaler.has_updated = bool(state.get("has_updated", True))  # new since 0.2.0


class LossScale:
    """Wraps torch's `GradScaler` so that ranks agree, as torch's `ShardedGradScaler` does."""

    def __init__(
        self, scaler: UpdatingScaler, optimizer: optim.Optimizer, device: torch.device
    ) -> None:
        self._scaler, self._optimizer, self._device = scaler, optimizer, device
        if self.is_on:
            scaler.scale(torch.zeros((), device=device))  # a rank may have no loss

    def of(self, optimizer: optim.Optimizer) -> Self:
        """Return the same scale for another optimizer."""
        return type(self)(self._scaler, optimizer, self._device)

    def apart(self, optimizer: optim.Optimizer) -> Self:
        """Return a separate scale for another optimizer. `agree` says which updates it skips."""
        scaler = UpdatingScaler(self._device.type, enabled=self.is_on)
        return type(self)(scaler, optimizer, self._device)

    @property
    def is_on(self) -> bool:
        return self._scaler.is_enabled()

    @property
    def factor(self) -> Tensor | None:
        if not self.is_on:
            return None
        factor: Tensor = self._scaler.scale(torch.ones((), device=self._device))
        return factor

    def undo(self) -> None:
        """Divide the gradients by the scale."""
        self._scaler.unscale_(self._optimizer)

    @property
    def has_overflowed(self) -> bool:
        """Whether a gradient of this rank was not finite."""
        return self.is_on and any(flag.item() for flag in self._found.values())

    def agree(self, has_overflowed: bool) -> None:
        """Set whether a gradient of any rank was not finite."""
        if self.is_on:
            # Set even on a rank that has no gradient at all.
            self._found[self._device] = torch.tensor(float(has_overflowed), device=self._device)

    def step(self) -> bool:
        """Update the weights and the scale; return False if a gradient has overflowed."""
        updates = not self.has_overflowed
        if updates:  # not by the scaler, which would undo the scale if nobody has done so here
            self._optimizer.step()
            self._scaler.has_updated = True
        self._scaler.update()
        return updates

    @property
    def _found(self) -> dict[Any, Tensor]:
        by_device: dict[Any, Tensor] = self._scaler._found_inf_per_device(self._optimizer)
        return by_device


UNUSED = -1.0
"""The norm that stands for a tensor without a gradient."""


@dataclass(frozen=True)
class Found:
    """A step's sums, and whether its gradients are usable; equal on all ranks of one model."""

    sums: Tensor
    """The sums of the loss, of the task's counts, and of what was counted with them."""
    is_finite: Tensor
    """Whether each parameter's mean gradient is finite: bool, shape (names,)."""
    norm: Tensor
    """The norm of the whole gradient before clipping, shape (); 0 if gradients are not clipped."""
    names: Sequence[str]
    """The parameters' names, in network order."""
    may_overflow: bool = False
    """Whether gradients may be infinite because the loss scale handles it."""
    squares: Tensor | None = None
    """Squared norms of gradients, shape (2,), before clipping; None if they are not measured.

    The first is the sum over micro-batches, the second that of their mean.
    """

    def to_host(self, queue: Queue) -> Self:
        return replace(
            self,
            sums=queue.to_host(self.sums),
            is_finite=queue.to_host(self.is_finite),
            norm=queue.to_host(self.norm),
            squares=None if self.squares is None else queue.to_host(self.squares),
        )


class Spread(Protocol):
    is_known: bool
    """Whether the result of `agree` is in the host's memory when it returns."""

    @property
    def norms(self) -> Norms: ...

    def agree(
        self, sums: Tensor, counted: int, finite: Tensor, clips: bool, scale: LossScale
    ) -> Found:
        """Agree on a step's sums and gradients. All ranks of the groups call it.

        Every rank has a share of the last `counted` sums. `clips` requests the norm of the whole
        gradient. `scale` learns whether a gradient of any rank has overflowed. Raises:
        PeerLostError.
        """

    def total(self, counts: Tensor) -> Tensor:
        """Return the sum of the counts of every rank of the groups. Raises: PeerLostError."""


class Alone:
    """A rank that knows all sums of a step. It never waits for a device."""

    is_known = False
    norms = staticmethod(own_norms)

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._names, self._parameters = list(named), list(named.values())

    def agree(
        self, sums: Tensor, counted: int, finite: Tensor, clips: bool, scale: LossScale
    ) -> Found:
        norm = torch.zeros((), device=sums.device)
        if clips:
            used = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            norm = nn.utils.get_total_norm(used, foreach=True)
        return Found(sums, finite, norm, self._names, scale.is_on)

    def total(self, counts: Tensor) -> Tensor:
        return counts


@dataclass(frozen=True)
class TensorPart:
    """A part of one of the network's tensors; the only one if the tensor is whole."""

    whole: str
    number: int = 0
    count: int = 1


class Among:
    """Ranks of which each knows some of a step's sums."""

    is_known = True

    def __init__(
        self,
        groups: Sequence[Group],
        network: Mapping[str, torch.dtype],
        parts: Mapping[str, TensorPart],
        named: Mapping[str, nn.Parameter],
        knows_sums: bool = True,
    ) -> None:
        """Prepare the ranks that hold one model. All of them call it. Raises: PeerLostError.

        This rank is in each of the groups. `network` has the dtypes of the network's trained
        parameters, in its order. `parts` has the tensor of each of this rank's gradients, in the
        order of `finite` in `agree`. `named` has the parameters that this rank updates, by the same
        names. `knows_sums` says whether this rank knows the loss.
        """
        self._groups = [group for group in groups if group.group is not None]
        self._names, self._dtypes = list(network), list(network.values())
        known = {part.whole: part.count for part in parts.values()}
        counts = [known.get(name, 1) for name in network]
        for group in self._groups:  # some rank may have no part of a tensor
            counts = [max(of_ranks) for of_ranks in zip(*gather_json(group, counts), strict=True)]
        ends = list(accumulate(counts, initial=0))
        spans = {name: range(*span) for name, span in zip(network, pairwise(ends), strict=True)}
        self._spans, self._num_parts = list(spans.values()), ends[-1]
        places = {name: spans[part.whole].start + part.number for name, part in parts.items()}
        self._places = list(places.values())
        self._span_of: dict[Tensor, range] = {p: spans[parts[n].whole] for n, p in named.items()}
        place_of = {p: places[n] for n, p in named.items()}
        sent_here = self._places_sent({*place_of.values(), *([-1] if knows_sums else [])})
        self._sends_sums = -1 in sent_here
        self._place_of: dict[Tensor, int] = {p: at for p, at in place_of.items() if at in sent_here}

    def _places_sent(self, places: set[int]) -> set[int]:
        of_ranks, position = [sorted(places)], 0
        for group in self._groups:
            of_groups = gather_json(group, of_ranks)
            position += group.rank * len(of_ranks)
            of_ranks = [place for of_group in of_groups for place in of_group]
        return places.difference(*of_ranks[:position])

    def agree(
        self, sums: Tensor, counted: int, finite: Tensor, clips: bool, scale: LossScale
    ) -> Found:
        local_sums = sums.cpu().double()
        if not self._sends_sums:
            local_sums[: len(local_sums) - counted] = 0.0
        broken = torch.zeros(self._num_parts, dtype=torch.float64)
        broken[self._places] = 1.0 - finite.cpu().double()
        norms = self._norms_of_gradients() if clips else broken[:0]
        overflowed = broken.new_tensor([float(scale.has_overflowed)])
        summed = self._sum(torch.cat([local_sums, broken, norms, overflowed]))
        sizes = [len(local_sums), len(broken), len(norms), 1]
        in_all, broken, norms, overflowed = torch.split(summed, sizes)
        scale.agree(bool(overflowed))
        norm = torch.zeros(())
        if clips:
            norm = total((self._of_parts(norms, span) for span in self._spans), self._dtypes)
        is_finite = [not broken[span.start : span.stop].any() for span in self._spans]
        return Found(in_all.to(sums.dtype), torch.tensor(is_finite), norm, self._names, scale.is_on)

    def total(self, counts: Tensor) -> Tensor:
        return self._sum(counts.cpu().double()).to(counts.dtype)

    def norms(
        self, weights: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]
    ) -> Sequence[Sequence[Tensor]]:
        """Return whole tensors' norms; see `solvers.update_rules.Norms`. Raises: PeerLostError."""
        local_norms = own_norms(weights, lists)
        if self._num_parts == len(self._spans):
            return local_norms  # all tensors are whole
        spans = [self._span_of[weight] for weight in weights]
        all_norms = self._sum(self._told(weights, local_norms))
        return [
            [
                norm if len(span) == 1 else self._of_parts(norms, span).to(norm)
                for norm, span in zip(of_own, spans, strict=True)
            ]
            for of_own, norms in zip(local_norms, all_norms, strict=True)
        ]

    def _norms_of_gradients(self) -> Tensor:
        gradients = {p: p.grad for p in self._place_of if p.grad is not None}
        used = list(gradients)
        local_norms = own_norms(used, [list(gradients.values())]) if used else [[]]
        norms = self._told(used, local_norms)[0]
        norms[[at for parameter, at in self._place_of.items() if parameter.grad is None]] = UNUSED
        return norms

    def _told(self, weights: Sequence[Tensor], norms: Sequence[Sequence[Tensor]]) -> Tensor:
        table = torch.zeros(len(norms), self._num_parts, dtype=torch.float64)
        here = [number for number, weight in enumerate(weights) if weight in self._place_of]
        places = [self._place_of[weights[number]] for number in here]
        for row, local_norms in zip(table, norms, strict=True):
            if places:
                row[places] = torch.stack([local_norms[number].double() for number in here]).cpu()
        return table

    @staticmethod
    def _of_parts(norms: Tensor, span: range) -> Tensor:
        part_norms = norms[span.start : span.stop]
        if len(part_norms) == 1 or part_norms[0] == UNUSED:
            return part_norms[0]
        return part_norms.square().sum().sqrt()

    def _sum(self, values: Tensor) -> Tensor:
        # A ring all-gather takes half as many sequential messages as a ring all-reduce. There are
        # few values, and no addition is rounded.
        for group in self._groups:
            rows = values.new_empty(group.world_size, *values.shape)
            finish(group, partial(dist.all_gather, list(rows), values, group=group.group))
            values = rows.sum(0)
        return values


def total(norms: Iterable[Tensor], dtypes: Iterable[torch.dtype]) -> Tensor:
    """Return the norm of all tensors from their float64 norms, in the network's order."""
    of_all = zip(norms, dtypes, strict=True)
    used = [norm.to(dtype) for norm, dtype in of_all if norm != UNUSED]
    return nn.utils.get_total_norm(used, foreach=True)
