"""Losses and accuracies against a real Caffe's, and the gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from firecaffe.caffe.binary import blob_fields
from firecaffe.caffe.message import CaffeError
from tests.kit.models_refused import refused
from tests.unit.caffe.layers import made
from tools.caffe_goldens.losses_and_accuracies import CASES, FILE

CAFFE = np.load(FILE)


def run(words: str, bottoms: dict[str, Any]) -> tuple[Tensor, ...]:
    values = [*map(torch.as_tensor, bottoms.values())]
    return made.run(made.module_of(words, *(tuple(each.shape) for each in values)), *values)


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_caffe_computes_it(name: str) -> None:
    prototxt, bottoms, grads, tops = CASES[name]
    given = {each: torch.tensor(array) for each, array in bottoms.items()}
    for each in grads:
        given[each].requires_grad_()
    tensors = dict(zip(tops, run(prototxt, given), strict=True))
    labels = bottoms["l"]
    if (labels == np.round(labels)).all():  # they may be whole numbers, too
        again = run(prototxt, {**bottoms, "l": labels.astype("int64")})
        assert all(map(torch.equal, again, tensors.values()))
    if grads:
        slopes = torch.autograd.grad(tensors["t"], [given[each] for each in grads])
        tensors |= {f"d{each}": slope for each, slope in zip(grads, slopes, strict=True)}
    for what, tensor in tensors.items():
        expected = torch.from_numpy(CAFFE[f"{name}/{what}"])
        assert tensor.shape == expected.shape
        error = (tensor.detach() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < 2e-6, (what, tensor, expected)


def layer(type: str, words: str = "", bottoms: str = "xl", tops: str = "t") -> str:
    names = [*(f'bottom: "{each}"' for each in bottoms), *(f'top: "{each}"' for each in tops)]
    return f'layer {{ name: "it" type: "{type}" {" ".join(names)} {words} }}'


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, 1, 2])


def test_a_sample_adds_at_most_87_3365() -> None:
    found = run(layer("SoftmaxWithLoss"), {"x": torch.tensor([[0.0, 1e4]]), "l": LABELS[:1]})
    assert float(found[0]) == pytest.approx(87.336545, rel=1e-7)


def test_softmax_gives_the_probabilities_too() -> None:
    """No golden record: the Caffe of these has no loss weights with which it takes two tops."""
    found = run(layer("SoftmaxWithLoss", tops="tp"), {"x": X, "l": LABELS})
    assert found[1].equal(X.softmax(1))


@pytest.mark.parametrize("label", [-100, -1, 3])
def test_a_label_without_a_class_is_an_error_and_not_left_out(label: int) -> None:
    with pytest.raises(IndexError):
        run(layer("SoftmaxWithLoss"), {"x": X, "l": LABELS.where(LABELS != 1, label)})


@pytest.mark.parametrize("num_weights", [0, 1, 2])
@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_smooth_l1_is_as_published(sigma: float, num_weights: int) -> None:
    generator = np.random.RandomState(0)
    x, aims, inside, outside = generator.randn(4, 5, 6)
    inside = np.round(np.abs(inside))
    d = (x - aims) * (inside if num_weights > 0 else 1)
    scale = outside if num_weights > 1 else 1
    each = np.where(np.abs(d) < 1 / sigma**2, d**2 * sigma**2 / 2, np.abs(d) - 0.5 / sigma**2)
    slope = np.clip(d * sigma**2, -1, 1) * (inside if num_weights > 0 else 1) * scale / len(x)
    arrays = dict(zip("xlio"[: 2 + num_weights], (x, aims, inside, outside), strict=False))
    bottoms = {name: torch.tensor(array) for name, array in arrays.items()}
    bottoms["x"].requires_grad_()
    words = f"smooth_l1_loss_param {{ sigma: {sigma} }}"
    (found,) = run(layer("SmoothL1Loss", words, "".join(arrays)), bottoms)
    (found_slope,) = torch.autograd.grad(found, bottoms["x"])
    assert float(found.detach()) == pytest.approx((each * scale).sum() / len(x), rel=1e-12)
    assert np.allclose(found_slope, slope, rtol=1e-12)


def test_l1_is_the_sum_of_differences_by_sample() -> None:
    (found,) = run(layer("L1Loss"), {"x": X, "l": X.flip(0)})
    assert float(found) == pytest.approx(float((X - X.flip(0)).abs().sum(1).mean()))


@pytest.mark.parametrize("legacy", [False, True])
def test_the_weights_of_infogain_may_be_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool
) -> None:
    prototxt, bottoms, _, _ = CASES["infogain"]
    matrix = bottoms["h"] if legacy else bottoms["h"][0, 0]
    (tmp_path / "h.binaryproto").write_bytes(b"".join(blob_fields(matrix, legacy)))
    monkeypatch.chdir(tmp_path)
    words = 'infogain_loss_param { source: "h.binaryproto" }'
    (found,) = run(layer("InfogainLoss", words), {each: bottoms[each] for each in "xl"})
    assert found.equal(run(prototxt, bottoms)[0])


def test_no_number_is_not_correct() -> None:
    (share,) = run(layer("Accuracy"), {"x": X * torch.nan, "l": LABELS})
    assert float(share) == 0


XL = {"x": X, "l": LABELS}
NO_FILE = 'infogain_loss_param { source: "no.binaryproto" }'
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (layer("SoftmaxWithLoss", bottoms="x"), {"x": X}, "has 1 bottoms; expected 2"),
    (layer("SoftmaxWithLoss"), {"x": X, "l": X}, "takes 4 labels for values of (4, 3)"),
    (layer("EuclideanLoss"), XL, "of one shape; found (4, 3) and (4,)"),
    (layer("Accuracy", "accuracy_param { top_k: 4 }"), XL, "top_k is 4; expected 1 to"),
    (layer("SoftmaxWithLoss", "softmax_param { axis: 2 }"), XL, "axis is 2, but its bottom"),
    (layer("SmoothL1Loss", "smooth_l1_loss_param { sigma: 0 }"), XL, "sigma is 0; expected more"),
    (layer("InfogainLoss", NO_FILE), XL, "no.binaryproto: is no file"),
    (layer("InfogainLoss"), XL, "neither infogain_loss_param source nor"),
    (layer("InfogainLoss", bottoms="xlh"), XL | {"h": X}, "a matrix of 3 x 3; found 12 numbers"),
    (layer("ContrastiveLoss", bottoms="xyl"), {"x": X, "y": X, "l": X}, "labels of (4, 3)"),
]


@pytest.mark.parametrize(("prototxt", "bottoms", "part"), REFUSED)
def test_what_cannot_be_is_said(prototxt: str, bottoms: dict[str, Any], part: str) -> None:
    with refused(CaffeError, [part]) as caught:
        run(prototxt, bottoms)
    assert str(caught.value).startswith(("net.prototxt:1: ", "no.binaryproto"))
