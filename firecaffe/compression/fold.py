"""BatchNorm in evaluation is y = weight (x - mean) / sqrt(var + eps) + bias = scale x + shift."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def fold_normalization(network: nn.Module) -> list[str]:
    """Fold each BatchNorm's statistics into weight and bias; return the layers' names.

    The mean becomes 0 and the variance 1 - eps, so that a file needs no numbers for them. Outputs
    in evaluation are equal up to rounding. Do not train the network further. A BatchNorm without
    statistics, or without weight and bias, is not changed.
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
