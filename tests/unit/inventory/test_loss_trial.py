"""What a loss is a mean of, by its values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.unusual.layers import contrast
from firecaffe.errors import RecipeError
from firecaffe.inventory.loss_trial import MEAN, RAISED, UNKNOWN, WHOLE, check_reduction, mean_of

WEIGHTS = torch.tensor([5.0, 1.0, 1.0, 2.0])


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(8, 4, generator=draw).to(dtype)
    return outputs, torch.randint(0, 4, (8,), generator=draw)


def decorrelation(outputs: Tensor, _: Tensor) -> Tensor:
    return (torch.cov(outputs.T) - torch.eye(4)).square().mean()


def hardest(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none").max()


def each_weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, WEIGHTS.to(outputs), reduction="none").mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "of"),
    [
        (F.cross_entropy, MEAN),
        (each_weighted, MEAN),
        (lambda outputs, labels: outputs.sum() * 0, MEAN),
        (contrast, WHOLE),
        (decorrelation, WHOLE),
        (hardest, WHOLE),
    ],
)
def test_a_mean_and_one_of_the_whole(loss: Any, of: str, dtype: torch.dtype) -> None:
    assert mean_of("loss", loss, *batch(dtype)) == of


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, WEIGHTS)


def among_some(outputs: Tensor, labels: Tensor) -> Tensor:
    counted = (labels > 1).float()
    each = F.cross_entropy(outputs, labels, reduction="none")
    return (each * counted).sum() / counted.sum().clamp(min=1)


def summed(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "word"),
    [(weighted, "weighted mean"), (among_some, "fewer than"), (summed, "a sum")],
)
def test_what_a_micro_batch_would_weigh_is_refused(
    loss: Callable[[Tensor, Tensor], Tensor], word: str
) -> None:
    with pytest.raises(RecipeError, match=word):
        mean_of("loss", loss, *batch())


def test_what_raises_on_some_samples_is_said() -> None:
    def of_eight(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.reshape(8, 4), labels)

    assert mean_of("loss", of_eight, *batch()) == f"{RAISED} RuntimeError"


def test_samples_without_a_label() -> None:
    outputs, labels = batch()
    labels[3] = -100
    with pytest.raises(RecipeError, match="ignore_index"):
        mean_of("loss", F.cross_entropy, outputs, labels)


def test_trees_of_outputs() -> None:
    outputs, labels = batch()

    def loss(outputs: dict[str, Tensor], labels: tuple[Tensor]) -> Tensor:
        return F.cross_entropy(outputs["logits"], labels[0])

    assert mean_of("loss", loss, {"logits": outputs}, (labels,)) == MEAN
    given = {"logits": outputs, "loss": torch.tensor(1.0)}
    assert mean_of("loss", lambda *_: given["loss"], given, labels) == UNKNOWN


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(WEIGHTS), nn.NLLLoss(WEIGHTS), nn.MSELoss(reduction="sum")]
)
def test_torchs_own_say_it_themselves(loss: nn.Module) -> None:
    with pytest.raises(RecipeError, match=type(loss).__name__):
        check_reduction("loss", loss)
    check_reduction("loss", nn.CrossEntropyLoss())
