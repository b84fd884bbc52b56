"""What a network is to the rest: a row of the table, what it returns, and the loss of that.

Source of the auxiliary heads and their weight: Szegedy et al. 2014 (GoogLeNet, arXiv 1409.4842),
section 5, and `loss_weight: 0.3` in BVLC's bvlc_googlenet/train_val.prototxt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

AUX_WEIGHT = 0.3


@dataclass(frozen=True)
class Model:
    """One row of MODELS.

    Args:
        build: Called as `build(num_classes=..., in_channels=...)`, returns an initialized network.
        input_CHW: The crop that its authors train on: channels, rows and columns.
        num_classes: The classes of the data set that it was made for.
        page: Its documentation, relative to the root of the repository.
    """

    build: Callable[..., nn.Module]
    input_CHW: tuple[int, int, int]
    num_classes: int
    page: str


class HeadedLogits(NamedTuple):
    """What a network with auxiliary heads returns in training; torchvision's order.

    Each is (batch, num_classes); aux1 sits nearest to the input.
    """

    logits: Tensor
    aux2: Tensor
    aux1: Tensor


def logits_of(outputs: Tensor | HeadedLogits) -> Tensor:
    """The prediction itself, (batch, num_classes), whether or not heads came with it."""
    return outputs.logits if isinstance(outputs, HeadedLogits) else outputs


def classification_loss(outputs: Tensor | HeadedLogits, labels_B: Tensor) -> Tensor:
    """Mean cross entropy over the batch; an auxiliary head adds AUX_WEIGHT times its own."""
    loss = F.cross_entropy(logits_of(outputs), labels_B)
    if isinstance(outputs, HeadedLogits):
        for head in (outputs.aux2, outputs.aux1):
            loss = loss + AUX_WEIGHT * F.cross_entropy(head, labels_B)
    return loss
