"""Local response normalization across channels, with a deterministic backward on CUDA.

    y_c = x_c / (k + alpha / size * sum over the `size` channels around c of x^2) ^ beta

Source: Krizhevsky et al. 2012 (AlexNet), section 3.3. alpha / size, k = 1 and the default values
are those of Caffe's LRN layer, which the authors' files rely on.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class LocalResponseNorm(nn.Module):
    """Normalize (batch, channels, height, width) across channels. The shape is kept."""

    def __init__(
        self, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
    ) -> None:
        super().__init__()
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def forward(self, x_BCHW: Tensor) -> Tensor:
        # For four dimensions, torch uses avg_pool3d, whose backward on CUDA adds in no fixed order.
        # For three, it uses avg_pool2d, whose order is fixed. The sum over channels is the same.
        x_BCN = x_BCHW.flatten(2)
        y_BCN: Tensor = F.local_response_norm(x_BCN, self.size, self.alpha, self.beta, k=self.k)
        return y_BCN.reshape(x_BCHW.shape)

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"


class LocalResponseNormWithinChannel(nn.Module):
    """Compute x / (1 + alpha * mean of x^2) ^ beta over size x size pixels; 0 beyond the edge."""

    def __init__(self, size: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.size, self.alpha, self.beta = size, alpha, beta

    def forward(self, x_BCHW: Tensor) -> Tensor:
        mean_BCHW = F.avg_pool2d(x_BCHW.square(), self.size, stride=1, padding=self.size // 2)
        return x_BCHW * (1 + self.alpha * mean_BCHW) ** -self.beta

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}"
