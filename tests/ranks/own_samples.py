"""A small network in parts whose ranks have samples of their own, by one weird trick."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.layer_split import choose_layers, replace_layers

WORDS = {"classifier.*": "neurons", "classifier.3": "inputs"}
PARTS = 4
SAMPLES = 6, 6, 4, 5
"""Of each micro-batch."""


class Small(nn.Module):
    """A convolution, and two fully connected layers with dropout, as AlexNet's last."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 10, 5, stride=2), nn.ReLU(inplace=True))
        self.classifier = nn.Sequential(
            *(nn.Linear(250, 37), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(37, 22), nn.ReLU(inplace=True), nn.Linear(22, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(F.dropout(self.features(x), 0.1, self.training).flatten(1))
        return y


def split_by(group: PartGroup) -> nn.Module:
    torch.manual_seed(3)
    model = Small()
    return replace_layers(model, choose_layers(model, WORDS), group).module


def loss_of(model: nn.Module, leaf: int) -> Tensor:
    torch.manual_seed(100 + leaf)
    x = torch.randn(SAMPLES[leaf], 3, 13, 13)
    return F.cross_entropy(model(x), torch.arange(len(x)) % 5)
