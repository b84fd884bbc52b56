"""A training script of one's own with DistributedDataParallel, its gradients summed by firecaffe.

torchrun --nproc-per-node 2 examples/ddp_script.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import firecaffe
from firecaffe.cluster.agree import digest
from firecaffe.data import DataConfig, Dataset, open_data
from firecaffe.models import build_model

STEPS, BATCH_SIZE = 30, 32


def load() -> Dataset:
    """Fashion-MNIST where `firecaffe data get` has put it, else ten classes of made-up patterns."""
    try:
        return open_data(DataConfig("fashion-mnist")).train
    except firecaffe.FirecaffeError:
        return open_data(DataConfig("generated")).train


def batch(data: Dataset, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Other samples on every rank and in every step."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    images, labels = data.batch(torch.randint(len(data), (BATCH_SIZE,), generator=generator))
    return images / 255 - 0.5, labels


def main() -> None:
    torch.manual_seed(0)
    data = load()
    network = build_model("lenet", num_classes=10, in_channels=1)
    compressor = os.environ.get("COMPRESSOR", "none")
    model = firecaffe.parallelize(network, compressor=compressor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        images, labels = batch(data, step, dist.get_rank())
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if step % 10 == 0 or step == STEPS - 1:
            print(f"rank {dist.get_rank()} step {step} loss {mean:.6f}", flush=True)
    weights = digest(network.state_dict().items())
    print(f"rank {dist.get_rank()} weights {weights[:12]}", flush=True)


if __name__ == "__main__":
    main()
