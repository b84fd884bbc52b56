"""The loss scale of float16, where the ranks of a row have parts of a model's gradient."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from firecaffe.cluster.agree import finish
from firecaffe.cluster.group import Group


def begin_scale(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Makes the scale where no loss is scaled."""
    scaler.scale(torch.zeros((), device=device))


def unscale(scaler: torch.amp.GradScaler, optimizer: optim.Optimizer, row: Group | None) -> None:
    """Undoes the loss scale of the gradients. A row skips the step, and lowers its scale, if one of
    its ranks has seen a gradient that is not finite; with torch's `ShardedGradScaler` it is alike.

    row: None for a model that each rank has whole. Raises: PeerLostError.
    """
    scaler.unscale_(optimizer)
    if row is None or row.group is None or not scaler.is_enabled():
        return
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    told = torch.tensor([float(any(each.item() for each in found.values()))])
    finish(row, partial(dist.all_reduce, told, dist.ReduceOp.MAX, group=row.group))
    # Also of a rank that has no gradient at all.
    found[row.device] = told[0].to(row.device)
