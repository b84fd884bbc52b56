"""The normalization against its formula, and against torch's."""

import pytest
import torch

from firecaffe.caffe.local_response_norm import LocalResponseNorm, LocalResponseNormWithinChannel


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


def test_within_a_channel_it_is_caffes_formula() -> None:
    """1 + alpha / 9 * the sum over 3 x 3 places, those beyond the edge counted as 0."""
    x_BCHW = 10 * torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    y_BCHW = LocalResponseNormWithinChannel(3, alpha=0.1, beta=0.75)(x_BCHW)
    for row in range(4):
        for column in range(5):
            rows, columns = slice(max(0, row - 1), row + 2), slice(max(0, column - 1), column + 2)
            around_BC = x_BCHW[:, :, rows, columns].square().sum((2, 3))
            expected_BC = x_BCHW[:, :, row, column] / (1 + 0.1 / 9 * around_BC) ** 0.75
            torch.testing.assert_close(y_BCHW[:, :, row, column], expected_BC)
