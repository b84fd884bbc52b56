"""torch's losses of classes as means over the samples, also of those that have no label."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

Loss = Callable[[Any, Any], Tensor]


def over_samples(loss: Loss) -> Loss:
    """The loss itself; but where torch's own takes the mean over the labels that a micro-batch
    happens to have, without those of `ignore_index`, the mean over all: one without a label adds 0.
    So the size of a micro-batch does not decide what a label weighs, and one without labels has the
    loss 0, not NaN.
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
            value: Tensor = loss(outputs, targets)  # targets that are shares of each class
            return value
        if isinstance(loss, nn.CrossEntropyLoss):
            smoothing = loss.label_smoothing
            each = cross_entropy(
                outputs,
                targets,
                ignore_index=loss.ignore_index,
                label_smoothing=smoothing,
                reduction="sum",
            )
        else:
            each = nll_loss(outputs, targets, ignore_index=loss.ignore_index, reduction="sum")
        return each / max(1, targets.numel())
