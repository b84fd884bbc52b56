"""Losses and accuracies of a real Caffe: what they come to, and their gradients.

    PYTHON-OF-A-REAL-CAFFE tools/caffe_goldens/losses_and_accuracies.py

writes losses_and_accuracies.npz in tests/golden/caffe: of each case the tops, and the
gradient of those bottoms that have one. The table is read by the tests too, which make the same
bottoms.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FILE = os.path.join(ROOT, "tests", "golden", "caffe", "losses_and_accuracies.npz")


Arrays = dict[str, Any]
Case = tuple[str, Arrays, str, Sequence[str]]
"""The layer, its bottoms, those with a gradient, and its tops."""


def values(*shape: int, seed: int = 0, scale: float = 3.0) -> Any:
    return (np.random.RandomState(seed).randn(*shape) * scale).astype(np.float32)


def shares(*shape: int, seed: int = 0) -> Any:
    return np.random.RandomState(seed).rand(*shape).astype(np.float32)


def labels(*shape: int, classes: int = 5, seed: int = 1) -> Any:
    return np.random.RandomState(seed).randint(0, classes, shape).astype(np.float32)


def simplex(*shape: int, seed: int = 0) -> Any:
    """Probabilities of which some are 0."""
    found = np.maximum(shares(*shape, seed=seed) - 0.4, 0)
    return found / found.sum(1, keepdims=True)


# The second sample's label has a probability far below FLT_MIN, the third's one just above it.
FAR = np.array([[1, 2, 3], [200, 0, 5], [86, 0, -50], [-3, 0, 500]], np.float32)
TIES = np.array([[1, 2, 2, 2], [2, 2, 1, 1], [0, 0, 0, 0], [3, 1, 2, 3]], np.float32)
PAIRS = (values(6, 4, seed=3, scale=0.6), values(6, 4, seed=4, scale=0.6))
PAIRS[1][4:] = PAIRS[0][4:]  # at no distance, together and apart
TOGETHER = np.array([1, 0, 0, 1, 0, 1], np.float32)
SPATIAL = {"x": values(3, 5, 2, 4), "l": labels(3, 2, 4)}
VECTORS = {"x": values(6, 5), "l": labels(6)}
MANY = {"x": values(4, 3, 2), "l": np.round(shares(4, 3, 2, seed=2))}
BOXES = {
    "x": values(4, 8),
    "l": values(4, 8, seed=1),
    "i": np.round(shares(4, 8)),
    "o": shares(4, 8),
}
MATRIX = shares(1, 1, 5, 5, seed=7)


def case(
    type: str, bottoms: Arrays, words: str = "", grads: str = "x", tops: Sequence[str] = ("t",)
) -> Case:
    names = [*(f'bottom: "{each}"' for each in bottoms), *(f'top: "{each}"' for each in tops)]
    weights = "loss_weight: 1 loss_weight: 0" if grads and len(tops) > 1 else ""
    text = f'layer {{ name: "it" type: "{type}" {" ".join(names)} {weights} {words} }}'
    return text, bottoms, grads, tops


TWO = ("t", "p")
CASES = {
    "softmax": case("SoftmaxWithLoss", VECTORS),
    "softmax, spatial": case("SoftmaxWithLoss", SPATIAL),
    "softmax, last axis": case(
        "SoftmaxWithLoss", {"x": values(3, 4, 5), "l": labels(3, 4)}, "softmax_param { axis: -1 }"
    ),
    "softmax, far": case("SoftmaxWithLoss", {"x": FAR, "l": np.array([0, 1, 1, 0], "f")}),
    "softmax, none counts": case(
        "SoftmaxWithLoss", {"x": values(2, 5), "l": labels(2) * 0}, "loss_param { ignore_label: 0 }"
    ),
    "softmax, one counts": case(
        "SoftmaxWithLoss",
        {"x": values(2, 5), "l": np.array([0, 3], np.float32)},
        "loss_param { ignore_label: 0 }",
    ),
    "euclidean": case("EuclideanLoss", {"x": values(4, 3), "l": values(4, 3, seed=1)}, grads="xl"),
    "euclidean, column": case("EuclideanLoss", {"x": values(4, 1), "l": values(4, seed=1)}),
    "sigmoid": case("SigmoidCrossEntropyLoss", MANY),
    "sigmoid, shares": case(
        "SigmoidCrossEntropyLoss", {"x": values(4, 3, scale=60), "l": shares(4, 3, seed=2)}
    ),
    "hinge": case("HingeLoss", VECTORS),
    "hinge, L2": case("HingeLoss", VECTORS, "hinge_loss_param { norm: L2 }"),
    "hinge, at 0": case("HingeLoss", {"x": TIES - 1, "l": labels(4, classes=4)}),
    "contrastive": case(
        "ContrastiveLoss", {"x": PAIRS[0], "y": PAIRS[1], "l": TOGETHER}, grads="xy"
    ),
    "contrastive, margin": case(
        "ContrastiveLoss",
        {"x": PAIRS[0], "y": PAIRS[1], "l": TOGETHER},
        "contrastive_loss_param { margin: 2.5 }",
        "xy",
    ),
    "contrastive, legacy": case(
        "ContrastiveLoss",
        {"x": PAIRS[0], "y": PAIRS[1], "l": TOGETHER},
        "contrastive_loss_param { margin: 3 legacy_version: true }",
        "xy",
    ),
    "multinomial": case("MultinomialLogisticLoss", {"x": simplex(6, 5), "l": labels(6)}),
    "infogain": case("InfogainLoss", {**VECTORS, "h": MATRIX}),
    "infogain, spatial": case(
        "InfogainLoss",
        {**SPATIAL, "h": MATRIX},
        "infogain_loss_param { axis: 1 } loss_param { ignore_label: 2 normalization: FULL }",
        tops=TWO,
    ),
    "infogain, far": case("InfogainLoss", {"x": FAR, "l": labels(4, classes=3), "h": shares(3, 3)}),
    "accuracy": case("Accuracy", VECTORS, grads=""),
    "accuracy, top 3": case("Accuracy", VECTORS, "accuracy_param { top_k: 3 }", ""),
    "accuracy, spatial": case(
        "Accuracy", SPATIAL, "accuracy_param { top_k: 2 ignore_label: 1 axis: -3 }", "", TWO
    ),
    "accuracy, classes": case(
        "Accuracy", {"x": values(9, 5), "l": labels(9, classes=4)}, grads="", tops=TWO
    ),
    "accuracy, none counts": case(
        "Accuracy",
        {"x": values(2, 5), "l": labels(2) * 0},
        "accuracy_param { ignore_label: 0 }",
        "",
    ),
}
for how in ("FULL", "VALID", "BATCH_SIZE", "NONE"):
    for ignored in ("", "ignore_label: 1"):
        words = f"loss_param {{ normalization: {how} {ignored} }}"
        name = f"{how}, ignored" if ignored else how
        CASES["softmax, " + name] = case("SoftmaxWithLoss", SPATIAL, words)
        CASES["sigmoid, " + name] = case("SigmoidCrossEntropyLoss", MANY, words)
for old in ("true", "false"):
    words = f"loss_param {{ normalize: {old} ignore_label: 1 }}"
    CASES["softmax, normalize " + old] = case("SoftmaxWithLoss", SPATIAL, words)
    CASES["sigmoid, normalize " + old] = case("SigmoidCrossEntropyLoss", MANY, words)
CASES["softmax, both words"] = case(
    "SoftmaxWithLoss", SPATIAL, "loss_param { normalize: false normalization: FULL }"
)
for top_k in (1, 2, 3):
    for label in range(4):
        CASES[f"ties, top {top_k}, label {label}"] = case(
            "Accuracy",
            {"x": TIES, "l": np.full(4, label, np.float32)},
            f"accuracy_param {{ top_k: {top_k} }}",
            "",
        )


def by_caffe(text: str, bottoms: Arrays, grads: str, tops: Sequence[str]) -> Arrays:
    """The tops, and the gradient of bottoms: through a Scale of 1, as inputs have none."""
    import caffe

    net = ""
    for name, array in bottoms.items():
        top = name + "_in" if name in grads else name
        dims = " ".join(f"dim: {size}" for size in array.shape)
        net += f'layer {{ name: "{top}" type: "Input" top: "{top}" '
        net += f"input_param {{ shape {{ {dims} }} }} }}\n"
        if name in grads:
            net += f'layer {{ name: "s{name}" type: "Scale" bottom: "{top}" top: "{name}" '
            net += "scale_param { axis: 0 num_axes: 0 filler { value: 1 } } }\n"
    with tempfile.NamedTemporaryFile("w", suffix=".prototxt") as file:
        file.write(net + text)
        file.flush()
        made = caffe.Net(file.name, caffe.TEST)
    for name, array in bottoms.items():
        made.blobs[name + "_in" if name in grads else name].data[...] = array
    made.forward()
    found = {top: made.blobs[top].data.copy() for top in tops}
    if grads:
        made.backward()
        found.update({"d" + name: made.blobs[name].diff.copy() for name in grads})
    return found


def main() -> None:
    found = {}
    for name, each in CASES.items():
        for what, array in by_caffe(*each).items():
            found[f"{name}/{what}"] = array
    np.savez_compressed(FILE, **found)
    print(f"{len(CASES)} cases, {os.path.getsize(FILE)} bytes")


if __name__ == "__main__":
    main()
