"""The interface of networks: a row of the table, the outputs, and their loss.

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
        build: Called as `build(num_classes=..., in_channels=...)`. Returns an initialized network.
        input_CHW: The crop that its authors train on: channels, rows and columns.
        num_classes: The number of classes of the data set that it was made for.
        source: Where it was published, as authors and year; or that it is firecaffe's own.
    """

    build: Callable[..., nn.Module]
    input_CHW: tuple[int, int, int]
    num_classes: int
    source: str


class HeadedLogits(NamedTuple):
    """Outputs with auxiliary heads in training, each (batch, num_classes); torchvision's order."""

    logits: Tensor
    aux2: Tensor
    aux1: Tensor  # of the head nearest to the input


def logits_of(outputs: Tensor | HeadedLogits) -> Tensor:
    return outputs.logits if isinstance(outputs, HeadedLogits) else outputs


def classification_loss(outputs: Tensor | HeadedLogits, labels_B: Tensor) -> Tensor:
    """Return the mean cross entropy of the batch; auxiliary heads add AUX_WEIGHT times theirs."""
    loss = F.cross_entropy(logits_of(outputs), labels_B)
    if isinstance(outputs, HeadedLogits):
        for head in (outputs.aux2, outputs.aux1):
            loss = loss + AUX_WEIGHT * F.cross_entropy(head, labels_B)
    return loss
