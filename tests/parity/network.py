"""The network of the bare loops."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from firecaffe.cluster.world import World
from firecaffe.training.state import state_of


class Net(nn.Module):
    """No dropout, whose noise is keyed by micro-batch, and no statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(6 * 9, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.conv1(images))
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def state_tensors(net: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors of a training, by their names in a checkpoint."""
    return state_of(World(0, 1, torch.device("cpu")), net, optimizer).tensors_held_by_all()
