"""torch's losses of classes as means over all samples."""

import pytest
import torch
from torch import nn
from torch.nn.functional import log_softmax

from firecaffe.tasks.over_samples import over_samples

OUTPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_with_labels_it_is_torchs_to_the_bit(loss: nn.CrossEntropyLoss) -> None:
    outputs, others = (OUTPUTS.clone().requires_grad_() for _ in range(2))
    ours, torchs = over_samples(loss)(outputs, LABELS), loss(others, LABELS)
    torch.autograd.backward(ours)
    torch.autograd.backward(torchs)
    assert torch.equal(ours, torchs)
    assert torch.equal(outputs.grad, others.grad)  # type: ignore[arg-type]


def test_a_sample_without_a_label_adds_nothing() -> None:
    labels = LABELS.clone()
    labels[::2] = -100
    for loss, outputs in (
        (nn.CrossEntropyLoss(), OUTPUTS),
        (nn.NLLLoss(), log_softmax(OUTPUTS, 1)),
    ):
        torch.testing.assert_close(over_samples(loss)(outputs, labels), loss(outputs, labels) / 2)
    none = torch.full((8,), -100)
    assert over_samples(nn.CrossEntropyLoss())(OUTPUTS, none) == 0


def test_others_stay_as_they_are() -> None:
    mean = nn.MSELoss()
    assert over_samples(mean) is mean
    shares = OUTPUTS.softmax(1)
    loss = nn.CrossEntropyLoss()
    assert torch.equal(over_samples(loss)(OUTPUTS, shares), loss(OUTPUTS, shares))
