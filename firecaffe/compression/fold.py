"""BatchNorm without statistics: what it does in evaluation is a scale and a shift of each channel.

y = weight (x - mean) / sqrt(var + eps) + bias
  = scale x + shift    scale = weight / sqrt(var + eps), shift = bias - mean scale
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def fold_normalization(network: nn.Module) -> list[str]:
    """Makes scale and shift the weight and the bias of each BatchNorm, its mean 0, and its variance
    1 - eps, so that a file has no numbers for them. In evaluation its outputs are the same up to
    rounding; it is not for training on. Returns the layers' names.

    A BatchNorm without statistics, or without weight and bias, is left as it is.
    """
    folded = []
    for name, layer in network.named_modules():
        if not isinstance(layer, _BatchNorm) or not layer.affine:
            continue
        mean, var = layer.running_mean, layer.running_var
        if mean is None or var is None:
            continue
        scale = layer.weight.double() / (var.double() + layer.eps).sqrt()
        layer.bias.copy_(layer.bias.double() - mean.double() * scale)
        layer.weight.copy_(scale)
        mean.zero_()
        var.fill_(1 - layer.eps)
        folded.append(name)
    return folded
