"""A plain DDP script over Gloo, as anyone writes it: the control of `benchmarks.training.as_typed`.

Its batches lie in memory before its first step, so it never waits for data.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LARGEST_DIFFERENCE = 1e-3
"""Of DDP's gradient and that of the whole batch in one process, relative to the norm: kernels add
a batch of 8 in another order than one of 128.
"""

Batch = tuple[Tensor, Tensor]


def train(model: nn.Module, batches: Sequence[Batch], check: bool, out: Path) -> int:
    """Trains on this rank's share of each batch; rank 0 writes when each step began.

    batches: whole ones. check: whether to see first that the gradient is the whole batch's.
    """
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = [(images.chunk(ranks)[rank], labels.chunk(ranks)[rank]) for images, labels in batches]
    if check:
        check_gradient(model, batches[0], own[0])
    parallel = DistributedDataParallel(model)
    biases = [each for name, each in parallel.named_parameters() if name.endswith("bias")]
    weights = [each for name, each in parallel.named_parameters() if not name.endswith("bias")]
    groups = [
        {"params": weights, "weight_decay": 0.0001},
        {"params": biases, "lr": 0.1, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    before = _flat(parallel)
    losses, starts = list[float](), list[float]()
    for images, labels in own:
        starts.append(time.perf_counter())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    after = _flat(parallel)
    firsts = after.clone()
    dist.broadcast(firsts, 0)
    is_right = bool(firsts.equal(after) and not before.equal(after) and after.isfinite().all())
    if rank == 0:
        out.write_text(json.dumps({"starts": starts, "losses": losses}), encoding="utf-8")
    # Before its group: one that outlives it may wait for a thread of Gloo's for ever.
    del parallel, optimizer, groups, weights, biases
    dist.destroy_process_group()
    return 0 if is_right else 1


def check_gradient(model: nn.Module, whole: Batch, own: Batch) -> None:
    """Compares DDP's gradient of a batch, without dropout, with that of one process, on rank 0.

    Raises: SystemExit if they differ.
    """
    model.eval()
    ways: list[tuple[nn.Module, Batch]] = [(DistributedDataParallel(model), own)]
    ways += [(model, whole)] if dist.get_rank() == 0 else []
    found = list[Tensor]()
    for network, (images, labels) in ways:
        model.zero_grad()
        loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    model.zero_grad()
    model.train()
    difference = float((found[0] - found[-1]).norm() / found[-1].norm())
    if not difference <= LARGEST_DIFFERENCE:
        raise SystemExit(f"DDP's gradient differs by {difference:.2e} of its norm")


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])
