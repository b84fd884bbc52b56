"""A Caffe net as a task: its loss layers are the loss, its Accuracy layers the metrics."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firecaffe.caffe.graph import GraphStep
from firecaffe.caffe.judge import Blobs, Judge, read_judges
from firecaffe.errors import RecipeError
from firecaffe.tasks import TaskConfig
from firecaffe.tasks.metric import Sums
from firecaffe.tasks.outputs import part_of, prediction_of
from firecaffe.tasks.task import Counts, Task
from firecaffe.user_code import caffe_file

MEANINGS = {
    "InfogainLoss": "classification",
    "SigmoidCrossEntropyLoss": "multilabel",
    "SoftmaxWithLoss": "classification",
}
"""The built-in task, by type of Caffe loss, whose outputs have the same meaning."""


def caffe_task(config: TaskConfig, reserved: tuple[str, ...] = ()) -> Task:
    """Return the task of caffe:PATH. Raises RecipeError if the file is no net with a loss.

    Targets are the tops of the net's data layers after the first: a tensor, or a tuple of several.
    Outputs are the blobs that losses and accuracies take: a tensor, or `Heads` for several. No
    metric has a name of `reserved`.
    """
    train, test = read_judges(caffe_file("task.name", config.name))

    def judge_of(outputs: Any) -> Judge:
        return test if part_of(outputs, "phase") == "TEST" else train

    def loss(outputs: Any, targets: Any) -> Tensor:
        judge = judge_of(outputs)
        try:
            return judge.loss(_blobs(judge, outputs), targets)
        except IndexError as error:
            if "out of bounds" not in str(error):
                raise
            raise RecipeError(
                f"task.name {config.name}: a label has no place among the network's outputs: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def metric(step: GraphStep) -> Sums:
        return Sums(
            lambda outputs, targets: test.sums(step, _blobs(test, outputs), targets),
            lambda sums: sums[0] / sums[1].clamp(min=1),
            higher_is_better=True,
            is_share=True,
        )

    names = _names([accuracy.tops[0] for accuracy in test.accuracies], reserved)
    steps = dict(zip(names, test.accuracies, strict=True))
    return Task(
        loss,
        {name: metric(step) for name, step in steps.items()},
        counts=_counts(steps, train, test),
        classes=_classes(train),
        wrong=lambda outputs: _lacks(judge_of(outputs), outputs),
    )


def meaning_of(name: str) -> str:
    """Return the built-in task with the same kind of outputs, or "". Raises RecipeError."""
    train, _ = read_judges(caffe_file("task.name", name))
    main = train.parts.main_loss
    meaning = MEANINGS.get(main.type, "") if main is not None else ""
    is_map = main is not None and main.bottoms[1] in train.parts.maps
    return "segmentation" if is_map and meaning == "classification" else meaning


def _blobs(judge: Judge, outputs: Any) -> Blobs:
    wrong = _lacks(judge, outputs)
    if wrong:
        raise RecipeError(f"the network gives {wrong}")
    blobs = part_of(outputs, "blobs")
    return blobs if isinstance(blobs, Mapping) else {judge.parts.blobs[0]: prediction_of(outputs)}


def _lacks(judge: Judge, outputs: Any) -> str:
    names, blobs = judge.parts.blobs, part_of(outputs, "blobs")
    expected = f"expected {', '.join(names)}, which losses and accuracies take in {judge.phase}"
    if isinstance(blobs, Mapping):
        there = ", ".join(blobs)
        return "" if blobs.keys() >= {*names} else f"the blobs {there}; {expected}"
    return (
        ""
        if len(names) == 1
        else f"one output of {tuple(prediction_of(outputs).shape)}; {expected}"
    )


def _counts(steps: Mapping[str, GraphStep], train: Judge, test: Judge) -> Counts | None:
    """Count the first metric in training if it is the share of samples whose label ranks first."""
    if not steps or not {*test.parts.blobs} <= {*train.parts.blobs}:
        return None
    name, step = next(iter(steps.items()))
    param = step.layer.message("accuracy_param")
    if param.integer("top_k", 1) != 1 or param.has("ignore_label"):
        return None
    if step.bottoms[1] not in train.parts.labels:
        return None

    def count(outputs: Any, targets: Any) -> Tensor:
        return test.sums(step, _blobs(test, outputs), targets)[:1].to(torch.float32)

    return Counts((name,), count)


def _classes(judge: Judge) -> Callable[[Any], list[int]] | None:
    main = judge.parts.main_loss
    if main is None or MEANINGS.get(main.type) != "classification":
        return None
    name = main.bottoms[1]
    if name not in judge.parts.labels:
        return None
    return lambda targets: [int(label) for label in judge.named(targets)[name].flatten().tolist()]


def _names(tops: Sequence[str], reserved: Sequence[str]) -> list[str]:
    names: list[str] = []
    for top in tops:
        name = re.sub(r"\W", "_", top, flags=re.ASCII)
        name = name if name.isidentifier() else f"_{name}"
        while name in (*reserved, *names):
            name += "_"
        names.append(name)
    return names
