"""The normalization against its formula, and against torch's."""

import pytest
import torch

from firecaffe.models.local_response_norm import LocalResponseNorm


@pytest.mark.parametrize("channels", [1, 4, 9])
def test_is_the_formula(channels: int) -> None:
    x_BCHW = 10 * torch.randn(2, channels, 3, 5, generator=torch.Generator().manual_seed(0))
    y_BCHW = LocalResponseNorm(5, alpha=0.1, beta=0.75)(x_BCHW)
    for c in range(channels):
        around = x_BCHW[:, max(0, c - 2) : c + 3].square().sum(1)
        torch.testing.assert_close(y_BCHW[:, c], x_BCHW[:, c] / (1 + 0.1 / 5 * around) ** 0.75)


def test_is_torchs_with_its_gradient() -> None:
    x_BCHW = torch.randn(2, 7, 4, 6, generator=torch.Generator().manual_seed(0))
    grads = []
    for norm in (LocalResponseNorm(), torch.nn.LocalResponseNorm(5)):
        leaf = x_BCHW.clone().requires_grad_()
        y_BCHW = norm(leaf)
        (grad,) = torch.autograd.grad(y_BCHW.square().sum(), leaf)
        grads.append((y_BCHW.detach(), grad))
    torch.testing.assert_close(grads[0], grads[1])
