"""A computation that all ranks make alike, to see whether they compute the same bits.

Where ranks hold one model together, each computes parts that no other does, or a stage. So there
may be nothing to compare, and another kind of processor would be noticed by nobody.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from firecaffe.training.forward import Forward

SAMPLES, CHANNELS, ROWS, CLASSES = 4, 16, 12, 10


def reference_gradients(forward: Forward) -> dict[str, Tensor]:
    """The gradients of a small network's weights, by names: convolution, batch normalization, a
    pool, a fully connected layer. Weights and inputs are by formulas that are exact everywhere, and
    the arithmetic is the training's.
    """
    device = forward.device
    images = _numbers(SAMPLES, 3, ROWS, ROWS, device=device)
    filters = _numbers(CHANNELS, 3, 3, 3, device=device).requires_grad_()
    scale = _numbers(CHANNELS, device=device).requires_grad_()
    neurons = _numbers(CLASSES, CHANNELS * (ROWS // 2) ** 2, device=device).requires_grad_()
    with torch.enable_grad(), forward.arithmetic():
        x = F.conv2d(images, filters, padding=1)
        x = F.batch_norm(x, None, None, scale, training=True).relu()
        x = F.max_pool2d(x, 2).flatten(1)
        loss = F.cross_entropy(F.linear(x, neurons), torch.arange(SAMPLES, device=device))
    weights = {"filters": filters, "scale": scale, "neurons": neurons}
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return dict(zip(weights, gradients, strict=True))


def _numbers(*shape: int, device: torch.device) -> Tensor:
    """Numbers from -0.5 to 0.5 that need all digits: whole ones, divided by a prime."""
    count = torch.Size(shape).numel()
    prime = 1009
    whole = torch.arange(count, device=device) * 7919 % prime
    return (whole / prime - 0.5).view(shape)
