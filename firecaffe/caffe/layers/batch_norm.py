"""BatchNorm: subtracts the mean and divides by the standard deviation, and no more; a Scale layer
behind it has what torch calls weight and bias.

Caffe's three blobs are sums: of means, of variances, and of what these have been weighted with.
Each batch turns a sum S into moving_average_fraction S + its own, and what is used is the first two
over the third. Here they are buffers. A change is linear in what a batch adds, so the mean of the
changes of a step's micro-batches, which is what training keeps (gradients/buffers.py), is what the
mean of their statistics would have added: the same for any number of workers, and Caffe's own where
the micro-batch is the batch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


class BatchNorm(nn.Module):
    """(batch, channels, …) to the same shape.

    Args:
        kept: moving_average_fraction, what is kept of the sums from batch to batch.
        eps: Is added to a variance.
        uses_sums: Whether the sums' statistics are used and not the batch's; None: if not training.
    """

    mean: Tensor
    variance: Tensor
    factor: Tensor

    def __init__(self, channels: int, kept: float, eps: float, uses_sums: bool | None) -> None:
        super().__init__()
        self.kept, self.eps, self.uses_sums = kept, eps, uses_sums
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.zeros(channels))
        self.register_buffer("factor", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x_BCN = x if x.dim() > 1 else x[:, None]
        uses_sums = self.uses_sums if self.uses_sums is not None else not self.training
        if uses_sums:
            scale = torch.where(self.factor == 0, 0, 1 / self.factor)
            y = F.batch_norm(x_BCN, self.mean * scale, self.variance * scale, eps=self.eps)
        else:
            y = self._by_its_own(x_BCN)
        return y.view(x.shape)

    def _by_its_own(self, x_BCN: Tensor) -> Tensor:
        if x_BCN.numel() == x_BCN.shape[1]:  # one element a channel: torch refuses it
            mean, variance = x_BCN.detach().flatten(), torch.zeros_like(self.variance)
            y = x_BCN - x_BCN
        else:
            mean, variance = torch.zeros_like(self.mean), torch.zeros_like(self.variance)
            # With a momentum of 1 torch leaves the batch's own mean and unbiased variance there.
            y = F.batch_norm(x_BCN, mean, variance, training=True, momentum=1.0, eps=self.eps)
        with torch.no_grad():
            self.mean.mul_(self.kept).add_(mean)
            self.variance.mul_(self.kept).add_(variance)
            self.factor.mul_(self.kept).add_(1)
        return y

    def extra_repr(self) -> str:
        return f"{len(self.mean)}, kept={self.kept:g}, eps={self.eps:g}"


def batch_norm(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    param, bottom = spec.param, spec.bottoms[0]
    param.ignore("engine")
    uses_sums = param.flag("use_global_stats") if param.has("use_global_stats") else None
    eps, kept = param.number("eps", 1e-5), param.number("moving_average_fraction", 0.999)
    if not (eps > 0 and math.isfinite(eps)):
        raise spec.layer.error(
            f"BatchNorm {spec.name!r}: eps is {eps:g}; expected above 0", param.line_of("eps")
        )
    return BatchNorm(bottom[1] if len(bottom) > 1 else 1, kept, eps, uses_sums)


LAYERS = {"BatchNorm": Kind(batch_norm, "batch_norm_param", ("mean", "variance", "factor"))}
