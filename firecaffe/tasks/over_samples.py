"""Make torch's losses of classes means over the samples, even if some have no label."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

Loss = Callable[[Any, Any], Tensor]


def over_samples(loss: Loss) -> Loss:
    """Return the loss, with torch's mean over labels replaced by the mean over all samples.

    torch divides by the labels that are not `ignore_index` in a micro-batch. Here a sample without
    a label adds 0. So the micro-batch's size does not change the weight of a label, and a
    micro-batch without labels has the loss 0, not NaN. Other losses are returned as they are.
    """
    is_torchs = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)
    if not is_torchs or loss.reduction != "mean" or loss.weight is not None:  # type: ignore[attr-defined]
        return loss
    return _OverSamples(loss)


class _OverSamples:
    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        loss = self.loss
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            value: Tensor = loss(outputs, targets)  # shares of classes
            return value
        if isinstance(loss, nn.CrossEntropyLoss):
            smoothing = loss.label_smoothing
            total = cross_entropy(
                outputs,
                targets,
                ignore_index=loss.ignore_index,
                label_smoothing=smoothing,
                reduction="sum",
            )
        else:
            total = nll_loss(outputs, targets, ignore_index=loss.ignore_index, reduction="sum")
        return total / max(1, targets.numel())
