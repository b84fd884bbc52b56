"""Cases of losses and of Accuracy, a family a record."""

from __future__ import annotations

from tools.caffe_goldens.cases import (
    Case,
    below,
    chances,
    inputs,
    layer,
    positive,
    scaled,
    single,
    these,
)

BATCH, LABELS = (6, 4), (6,)
PLANES, PLANE_LABELS = (2, 4, 3, 2), (2, 1, 3, 2)
CLASSES = {"label": below(4)}


def softmax(name: str, words: str = "", tops: str = "loss", headless: tuple[str, ...] = ()) -> Case:
    """Over planes, so that the normalizations differ."""
    return single(
        name, "SoftmaxWithLoss", words, tops="loss", draws=CLASSES, x=PLANES, label=PLANE_LABELS
    )


def sigmoid(name: str, words: str = "") -> Case:
    draws = {"target": these(0, 1, 1, 0, 0.3, 1, 0, 1, 1, 0, 0, 1)}
    return single(
        name, "SigmoidCrossEntropyLoss", words, tops="loss", draws=draws, x=(3, 4), target=(3, 4)
    )


def contrastive(name: str, words: str = "") -> Case:
    return single(
        name,
        "ContrastiveLoss",
        words,
        tops="loss",
        draws={"similar": these(1, 0, 0, 1, 0), "a": scaled(0.5), "b": scaled(0.5)},
        a=(5, 3),
        b=(5, 3),
        similar=(5,),
    )


SOFTMAX = [
    single("plain", "SoftmaxWithLoss", tops="loss", draws=CLASSES, x=BATCH, label=LABELS),
    single(
        "label_of_4_axes",
        "SoftmaxWithLoss",
        tops="loss",
        draws=CLASSES,
        x=(6, 4, 1, 1),
        label=(6, 1, 1, 1),
    ),
    softmax("planes"),
    softmax("weight", "loss_weight: 0.3"),
    softmax("weight_0", "loss_weight: 0"),
    softmax("normalize_false", "loss_param { normalize: false }"),
    softmax("normalize_true", "loss_param { normalize: true ignore_label: 1 }"),
    softmax("ignore", "loss_param { ignore_label: 2 }"),
    *[
        softmax(f"{normalization}{ignore}".lower(), f"loss_param {{ {words} }}")
        for normalization in ("FULL", "VALID", "BATCH_SIZE", "NONE")
        for ignore in ("", "_ignore")
        for words in [f"normalization: {normalization}" + (" ignore_label: 1" if ignore else "")]
    ],
    single(
        "all_ignored",
        "SoftmaxWithLoss",
        "loss_param { ignore_label: 3 }",
        tops="loss",
        draws={"label": these(*[3] * 6)},
        x=BATCH,
        label=LABELS,
    ),
    single(
        "axis",
        "SoftmaxWithLoss",
        "softmax_param { axis: -1 }",
        tops="loss",
        draws=CLASSES,
        x=(2, 3, 4),
        label=(2, 3),
    ),
    single(
        "clamped",
        "SoftmaxWithLoss",
        tops="loss",
        draws={"label": these(0, 2), "x": these(0, 120, 3, 400, 0, 1)},
        x=(2, 3),
        label=(2,),
    ),
]

INFOGAIN = inputs(x=(5, 3), label=(5,), h=(1, 1, 4, 4)) + layer(
    "InnerProduct", "x", "y", "inner_product_param { num_output: 4 }"
)
LOSSES = [
    single("euclidean", "EuclideanLoss", tops="loss", x=(3, 4), z=(3, 4)),
    single(
        "euclidean_weight",
        "EuclideanLoss",
        "loss_weight: 2.5",
        tops="loss",
        x=(2, 3, 2),
        z=(2, 3, 2),
    ),
    sigmoid("sigmoid"),
    sigmoid("sigmoid_ignore", "loss_param { ignore_label: 1 }"),
    sigmoid("sigmoid_full", "loss_param { normalization: FULL }"),
    sigmoid("sigmoid_valid", "loss_param { normalization: VALID ignore_label: 0 }"),
    sigmoid("sigmoid_none", "loss_param { normalization: NONE }"),
    sigmoid("sigmoid_normalize", "loss_param { normalize: true ignore_label: 1 }"),
    single("hinge", "HingeLoss", tops="loss", draws=CLASSES, x=BATCH, label=LABELS),
    single(
        "hinge_l2",
        "HingeLoss",
        "hinge_loss_param { norm: L2 }",
        tops="loss",
        draws=CLASSES,
        x=BATCH,
        label=LABELS,
    ),
    contrastive("contrastive"),
    contrastive("contrastive_margin", "contrastive_loss_param { margin: 2.5 }"),
    contrastive("contrastive_legacy", "contrastive_loss_param { legacy_version: true margin: 2 }"),
    single(
        "multinomial",
        "MultinomialLogisticLoss",
        tops="loss",
        draws={**CLASSES, "x": chances},
        x=BATCH,
        label=LABELS,
    ),
    Case(
        "infogain",
        INFOGAIN + layer("InfogainLoss", "y label h", "loss"),
        draws={**CLASSES, "h": positive},
        passes="backward",
    ),
    Case(
        "infogain_none",
        INFOGAIN
        + layer(
            "InfogainLoss",
            "y label h",
            "loss p",
            "loss_weight: 1 loss_weight: 0 loss_param { normalization: NONE }",
        ),
        draws={**CLASSES, "h": positive},
        passes="backward",
        headless=("p",),
    ),
]


def accuracy(name: str, words: str = "", tops: str = "accuracy", planes: bool = False) -> Case:
    return single(
        name,
        "Accuracy",
        words,
        tops=tops,
        phase="TEST",
        draws=CLASSES,
        passes="forward",
        x=PLANES if planes else BATCH,
        label=PLANE_LABELS if planes else LABELS,
    )


ACCURACY = [
    accuracy("plain"),
    accuracy("top_2", "accuracy_param { top_k: 2 }"),
    accuracy("planes", planes=True),
    accuracy("ignore", "accuracy_param { ignore_label: 1 }", planes=True),
    accuracy("by_class", tops="accuracy by_class"),
    single(
        "axis",
        "Accuracy",
        "accuracy_param { axis: 2 }",
        tops="accuracy",
        phase="TEST",
        draws=CLASSES,
        passes="forward",
        x=(2, 3, 4),
        label=(2, 3),
    ),
    single(
        "ties",
        "Accuracy",
        "accuracy_param { top_k: 2 }",
        tops="accuracy",
        phase="TEST",
        draws={"x": these(1, 1, 1, 0, 2, 2, 2, 2, 3, 1, 3, 3), "label": these(2, 0, 2)},
        passes="forward",
        x=(3, 4),
        label=(3,),
    ),
]

FAMILIES = {"softmax_loss": SOFTMAX, "losses": LOSSES, "accuracy": ACCURACY}
