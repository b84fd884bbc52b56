"""The losses of the tasks against torch's own, and how they weigh samples."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from firecaffe.errors import RecipeError
from firecaffe.models import HeadedLogits, classification_loss
from firecaffe.tasks import CLASSIFICATION, TaskConfig, task_of
from firecaffe.tasks.task import over_samples
from tests.kit.models_refused import refused

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(12, 4, generator=GENERATOR)
LABELS = torch.randint(0, 4, (12,), generator=GENERATOR)
PIXELS = torch.randn(6, 3, 5, 4, generator=GENERATOR)
MASKS = torch.randint(0, 3, (6, 5, 4), generator=GENERATOR)
WEIGHTS = [0.5, 1.0, 2.0, 4.0]


def loss(name: str, outputs: Any, targets: Tensor, **words: Any) -> Tensor:
    classes = {"segmentation": 3}.get(name, 4)
    return task_of(TaskConfig(name, **words), classes).loss(outputs, targets)


def test_without_words_it_has_the_bits_that_it_had() -> None:
    heads = HeadedLogits(LOGITS, LOGITS * 2, LOGITS - LOGITS.flip(1))
    for outputs in (LOGITS, heads):
        assert torch.equal(
            CLASSIFICATION.loss(outputs, LABELS), classification_loss(outputs, LABELS)
        )


def test_label_smoothing_is_torchs_and_class_weights_are_over_samples() -> None:
    smoothed = loss("classification", LOGITS, LABELS, label_smoothing=0.1)
    assert torch.equal(smoothed, F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1))
    weighted = loss("classification", LOGITS, LABELS, class_weights=WEIGHTS)
    each = F.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(weighted, (each * torch.tensor(WEIGHTS)[LABELS]).sum() / 12)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "words"),
    [
        ("classification", LOGITS[:6], LABELS[:6], {"class_weights": WEIGHTS}),
        ("multilabel", LOGITS[:6], LOGITS[6:] > 0, {"class_weights": WEIGHTS}),
        ("regression", LOGITS[:6], LOGITS[6:], {"args": {"loss": "huber", "delta": 0.5}}),
        ("segmentation", PIXELS, MASKS, {"args": {"ignore_index": 2}}),
    ],
)
def test_micro_batches_do_not_change_the_mean(
    name: str, outputs: Tensor, targets: Tensor, words: dict[str, Any]
) -> None:
    """torch's means over weights or over pixels that count depend on who is in a micro-batch."""
    whole = loss(name, outputs, targets, **words).item()
    four, two = (
        loss(name, outputs[part], targets[part], **words).item() for part in (slice(4), slice(4, 6))
    )
    assert (4 * four + 2 * two) / 6 == pytest.approx(whole, rel=1e-6)


def test_a_sample_without_pixels_that_count_adds_nothing() -> None:
    torch.testing.assert_close(loss("segmentation", PIXELS, MASKS), F.cross_entropy(PIXELS, MASKS))
    masks = MASKS.index_fill(0, torch.tensor([0]), 255)
    words = {"args": {"ignore_index": 255}}
    whole = loss("segmentation", PIXELS, masks, **words)
    rest = loss("segmentation", PIXELS[1:], masks[1:], **words)
    torch.testing.assert_close(whole, rest * 5 / 6)


def test_regression_of_one_column_is_no_table() -> None:
    """(B, 1) less (B,) is (B, B) in torch."""
    column, row = LOGITS[:, :1], LOGITS[:, 1]
    assert loss("regression", column, row) == F.mse_loss(column[:, 0], row)
    assert loss("regression", row, column) == F.mse_loss(row, column[:, 0])
    with pytest.raises(RecipeError, match=r"\(12,\).*\(12, 4\)"):
        loss("regression", LOGITS, row)


def test_regressions_and_multilabels_losses_are_torchs() -> None:
    for word, torchs in (("mse", F.mse_loss), ("l1", F.l1_loss)):
        ours = loss("regression", LOGITS, LOGITS.flip(0), args={"loss": word})
        assert torch.equal(ours, torchs(LOGITS, LOGITS.flip(0)))
    targets = (LOGITS.flip(0) > 0).int()
    ours = loss("multilabel", LOGITS, targets, class_weights=WEIGHTS)
    weighted = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(WEIGHTS))
    assert torch.equal(ours, weighted(LOGITS, targets.float()))


class Headed(dict[str, Any]):
    """As transformers' ModelOutput is."""


def test_where_the_prediction_is() -> None:
    expected = CLASSIFICATION.loss(LOGITS, LABELS)
    assert torch.equal(CLASSIFICATION.loss(Headed(logits=LOGITS, loss=None), LABELS), expected)
    given = Headed(logits=LOGITS, loss=LOGITS.sum())
    assert torch.equal(CLASSIFICATION.loss(given, LABELS), LOGITS.sum())
    assert torch.equal(
        loss("segmentation", {"out": PIXELS}, MASKS), loss("segmentation", PIXELS, MASKS)
    )
    both = loss("segmentation", {"out": PIXELS, "aux": -PIXELS}, MASKS)
    alone = loss("segmentation", PIXELS, MASKS) + 0.5 * loss("segmentation", -PIXELS, MASKS)
    torch.testing.assert_close(both, alone)
    with pytest.raises(RecipeError, match="logits"):
        CLASSIFICATION.loss({"scores": LOGITS}, LABELS)
    with pytest.raises(RecipeError, match="no effect"):
        loss("classification", given, LABELS, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (MASKS.float() / 255, ["torch.float32", "whole numbers"]),
        (MASKS.index_fill(0, torch.tensor([1]), 7), ["sample 1", "class 7", "0 to 2", "-100"]),
        (MASKS - 50, ["class -5", "0 to 2"]),
    ],
    ids=["fractions", "beyond", "below"],
)
def test_masks_that_are_no_classes_are_refused(targets: Tensor, parts: list[str]) -> None:
    """Fractions were cut down to class 0 without a word, and every pixel was right."""
    with refused(RecipeError, ["task.name segmentation", *parts]):
        loss("segmentation", PIXELS, targets)


@pytest.mark.parametrize("words", [{}, {"class_weights": WEIGHTS}], ids=["", "weights"])
def test_a_label_that_is_no_output_is_refused(words: dict[str, Any]) -> None:
    """Was torch's IndexError."""
    labels = LABELS.index_fill(0, torch.tensor([1]), 7)
    with refused(RecipeError, ["task.name classification", "sample 1 ", "class 7", " 0 to 3"]):
        loss("classification", LOGITS, labels, **words)


OUTPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(8) % 4


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_with_labels_it_is_torchs_to_the_bit(loss: nn.CrossEntropyLoss) -> None:
    outputs, others = (OUTPUTS.clone().requires_grad_() for _ in range(2))
    ours, torchs = over_samples(loss)(outputs, CLASSES), loss(others, CLASSES)
    torch.autograd.backward(ours)
    torch.autograd.backward(torchs)
    assert torch.equal(ours, torchs)
    assert torch.equal(outputs.grad, others.grad)  # type: ignore[arg-type]


def test_a_sample_without_a_label_adds_nothing() -> None:
    labels = CLASSES.clone()
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
