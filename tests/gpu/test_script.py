"""`comm_hook` and `parallelize` with gradients on a GPU. Skips without."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import firecaffe
from tests.world import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def gradients(model: nn.Module, device: torch.device, rank: int) -> list[Tensor]:
    """The gradients of three steps; the buckets are cut anew after the first."""
    found: list[Tensor] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randn(4, 8, generator=generator).to(device)
        model.zero_grad()
        torch.autograd.backward(model(batch).square().mean())
        found += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    return found


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 5)).to(device)


def alone() -> None:
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    expected = gradients(network(device), device, 0)
    parallel = DistributedDataParallel(network(device), device_ids=[0])
    parallel.register_comm_hook(*firecaffe.comm_hook())
    wrapped = firecaffe.parallelize(network(device))
    for model in (parallel, wrapped):
        for own, reference in zip(gradients(model, device, 0), expected, strict=True):
            assert torch.equal(own, reference)
    dist.destroy_process_group()


def test_a_bucket_of_one_rank_is_a_future_on_its_device(ranks: Ranks) -> None:
    ranks.run(1, alone)


def together() -> None:
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    expected = gradients(DistributedDataParallel(network(device), [rank]), device, rank)
    for exchange in ("tree", "ring", "native"):
        model = firecaffe.parallelize(network(device), exchange=exchange, bucket_cap_mb=0.005)
        for own, reference in zip(gradients(model, device, rank), expected, strict=True):
            assert (own - reference).norm() <= 1e-5 * reference.norm(), exchange
    dist.destroy_process_group()


@needs_two
def test_gradients_are_those_of_ddp_over_nccl(ranks: Ranks) -> None:
    ranks.run(2, together)
