"""The tasks that a recipe may name, and a user's own."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.runs.measure import LOSS
from firecaffe.tasks import OWN_TASK, TaskConfig
from firecaffe.tasks.built_in_tasks import classification, multilabel, regression, segmentation
from firecaffe.tasks.metrics import check_named, names_for
from firecaffe.tasks.task import Task
from firecaffe.user_code import call, find, is_caffe, is_reference, shown
from firecaffe.value_checks import did_you_mean

TASKS: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "multilabel": multilabel,
    "regression": regression,
    "segmentation": segmentation,
}
"""The tasks by name: functions of [task], the number of classes or None, and own settings."""

RESERVED = (
    *("kind", "step", "samples", "loss", "learning_rate", "images_per_s", "largest_class_share"),
    *("steps", "metrics", "metric", "shares", "test_loss", "test_samples", "validation"),
    *("timed_samples", "timed_s", "exposed_communication", "data_wait", "data_wait_by_rank"),
    *("sent_bytes_per_step_by_rank", "idle_by_stage", "peak_memory_bytes_by_rank"),
    *("optimizer_bytes_by_rank", "best", "stopped_early", "test_of_best", "noise_scale"),
    *("noise_scale_low", "noise_scale_high", "evaluated", "weights_sha256", "state_sha256"),
    *("drifted_ranks", "checkpoints", "broken_images", "identity_doubts", "higher_is_better"),
    *("inventory", "first_weights", "frozen_parameters", "model", "world_size", "initial_lr"),
    *("exchange", "exchange_choice", "route", "data", "class_names", "samples_seen", "balance"),
    *("synchrony", "parallel", "parallel_choice", "tuned", "resumed_from", "lost_output"),
    *("plugins", "run", "best_step", "cost_of_determinism"),
)
"""Names that are fields of a record already."""


def check_task(config: TaskConfig) -> None:
    """Check the section without loading anything. Raises RecipeError."""
    if not 0 <= config.label_smoothing < 1:
        raise RecipeError(
            f"task.label_smoothing is {config.label_smoothing:g}; it must be at least 0 and below 1"
        )
    for weight in config.class_weights:
        if not 0 <= weight < inf:
            raise RecipeError(f"task.class_weights has {weight:g}; each must be 0 or more")
    if config.class_weights and not any(config.class_weights):
        raise RecipeError("task.class_weights are all 0; nothing would be learned")
    if config.name == OWN_TASK or is_reference(config.name) or is_caffe(config.name):
        return
    if config.name not in TASKS:
        raise RecipeError(
            f"task.name is {config.name!r}; expected one of {', '.join(TASKS)}, a function that "
            "returns a firecaffe.Task, as package.module:function, or a net of Caffe's, as "
            f"caffe:PATH/net.prototxt{did_you_mean(config.name, TASKS)}"
        )
    check_named(config, names_for(config.name))


def task_of(config: TaskConfig, num_classes: int | None) -> Task:
    """Return a checked recipe's task. Raises RecipeError, or OwnCodeError for an own function."""
    if is_caffe(config.name):
        from firecaffe.tasks.caffe import caffe_task  # loaded for such nets only

        return _as_asked(caffe_task(config, RESERVED), config)
    if config.name == OWN_TASK:
        raise RecipeError(
            f"task.name is {OWN_TASK!r}: no recipe names it, a script gives it; run that, or name "
            "a function that returns it, package.module:function"
        )
    if not is_reference(config.name):
        return _ours(config, num_classes)
    function = find("task.name", config.name)
    made = call("task.name", config.name, function, config.args)
    if not isinstance(made, Task):
        raise RecipeError(
            f"task.name {config.name!r} gave {shown(made)}; expected a firecaffe.Task(loss=…)"
        )
    try:
        check_own_task(made)
    except RecipeError as error:
        raise RecipeError(f"task.name {config.name!r}: {error}") from error
    return _as_asked(made, config)


def _ours(config: TaskConfig, num_classes: int | None) -> Task:
    arguments = {"num_classes": num_classes, **config.args}
    count = arguments.pop("num_classes")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise RecipeError(f"task.args.num_classes is {count!r}; expected a whole number, 1 or more")
    parameters = inspect.signature(TASKS[config.name]).parameters.values()
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for name, value in arguments.items():
        if name not in defaults:
            known = ["num_classes", *defaults]
            raise RecipeError(
                f"task.args has {name!r}; task.name {config.name} takes {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )
        kind = float if isinstance(defaults[name], float) else type(defaults[name])
        if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
            raise RecipeError(
                f"task.args.{name} is {value!r}; expected one like {defaults[name]!r}"
            )
    return TASKS[config.name](config, count, **arguments)


def check_own_task(task: Task) -> None:
    if isinstance(task.loss, type) or not callable(task.loss):
        raise RecipeError(
            f"task.loss is {shown(task.loss)}; expected a function of (outputs, targets), as "
            "torch.nn.CrossEntropyLoss() is"
        )
    check_parameters("task.loss", task.loss)
    for name in task.metrics:
        is_name = isinstance(name, str) and name.isidentifier()
        if not is_name or name in RESERVED or name.startswith("validation_"):
            raise RecipeError(
                f"metric {name!r} of the task is called as no metric can be; expected letters, "
                "digits and _, and no name that result.json, metrics.jsonl or evaluate have for "
                f"others, as {', '.join(RESERVED[:7])}"
            )
    _check_direction(task)


def check_parameters(word: str, loss: Any) -> None:
    """Raise RecipeError if a loss has parameters, because nothing would train them."""
    if isinstance(loss, nn.Module) and any(weight.requires_grad for weight in loss.parameters()):
        raise RecipeError(
            f"{word} is {type(loss).__name__}, which has parameters, and the network's alone are "
            "trained; make them the network's, and let it return what the loss needs"
        )


def _check_direction(task: Task) -> None:
    """Raise RecipeError if the direction of the metric that chooses is missing or disputed."""
    name, said = task.metric or next(iter(task.metrics), LOSS.name), task.higher_is_better
    if name != LOSS.name and name not in task.metrics:
        raise RecipeError(
            f"task.metric is {name!r}; the task's metrics are {', '.join(task.metrics) or 'none'}"
        )
    known = False if name == LOSS.name else task.measured[name].higher_is_better
    way = {True: "higher", False: "lower"}
    if said is not None and known is not None and said != known:
        raise RecipeError(
            f"task.higher_is_better is {said}, but of {name!r} {way[known]} is better; leave it out"
        )
    if said is None and known is None:
        raise RecipeError(
            f"metric {name!r} chooses, and nobody says which way it is better; give "
            "firecaffe.Task(…, higher_is_better=True), or False"
        )


def _as_asked(task: Task, config: TaskConfig) -> Task:
    check_named(config, list(task.metrics))
    names: Sequence[str] = config.metrics or list(task.metrics)
    if config.metric and config.metric != LOSS.name and config.metric not in names:
        names = [*names, config.metric]
    kept = {name: task.metrics[name] for name in names}
    metric = config.metric or (task.metric if task.metric in (*kept, LOSS.name) else "")
    is_same = (metric or next(iter(kept), LOSS.name)) == task.measure.name
    higher = task.higher_is_better if is_same else None
    asked = replace(task, metrics=kept, metric=metric, higher_is_better=higher)
    _check_direction(asked)
    return asked
