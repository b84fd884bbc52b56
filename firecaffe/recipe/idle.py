"""Words of a recipe that have no effect beside others, as a codec's level if there is no codec.

A table, so that nothing which was asked for is left out in silence: of a word that was typed it is
an error, of one in a recipe's file it is said (an override may have made it idle).
"""

from typing import Any

from firecaffe.recipe.identity import flatten
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import CAFFE, is_caffe, is_reference
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, LOCAL, SERVED, STALE

NOT_DEFAULT = ()
"""Stands for any value but the other word's default."""

REFERENCE = ("package.module:name",)
"""Stands for any name of a user's own code."""

COUNTS_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    "data.path": ("data.name", ("fashion-mnist", "mnist", "cifar10", "folder", "packed", CAFFE)),
    "data.resize": ("data.name", ("folder", "packed")),
    "data.decode_threads": ("data.name", ("folder", "packed", CAFFE)),
    "data.on_error": ("data.name", ("folder", "packed")),
    "data.cache": ("data.name", ("packed",)),
    "data.cache_bytes": ("data.cache", NOT_DEFAULT),
    "data.mirror": ("data.augment", ("caffe", "inception")),
    "task.label_smoothing": ("task.name", ("classification", "segmentation")),
    "task.class_weights": ("task.name", ("classification", "multilabel", "segmentation")),
    "train.stop_after": ("train.eval_every", NOT_DEFAULT),
    "train.ema_warmup": ("train.ema_decay", NOT_DEFAULT),
    "checkpoint.best": ("train.eval_every", NOT_DEFAULT),
    "solver.args": ("solver.type", REFERENCE),
    "solver.gamma": ("solver.lr_policy", ("step", "exp", "inv", "multistep", "sigmoid")),
    "solver.power": ("solver.lr_policy", ("inv", "poly")),
    "solver.stepsize": ("solver.lr_policy", ("step", "sigmoid")),
    "solver.stepvalue": ("solver.lr_policy", ("multistep",)),
    "solver.pct_start": ("solver.lr_policy", ("one_cycle",)),
    "solver.div_factor": ("solver.lr_policy", ("one_cycle",)),
    "solver.final_div_factor": ("solver.lr_policy", ("one_cycle",)),
    "solver.base_momentum": ("solver.lr_policy", ("one_cycle",)),
    "solver.reference_batch_size": ("solver.scale", NOT_DEFAULT),
    "solver.momentum": (
        "solver.type",
        ("sgd", "nesterov", "adadelta", "adam", "adamw", "lars", "lamb"),
    ),
    "solver.momentum2": ("solver.type", ("adam", "adamw", "lamb")),
    "solver.trust": ("solver.type", ("lars",)),
    "solver.rms_decay": ("solver.type", ("rmsprop",)),
    "solver.delta": ("solver.type", ("adagrad", "adadelta", "rmsprop", "adam", "adamw", "lamb")),
    "solver.decay_form": ("solver.weight_decay", NOT_DEFAULT),
    "solver.decay_mult": ("solver.weight_decay", NOT_DEFAULT),
    "exchange.compressor_level": ("exchange.compressor", NOT_DEFAULT),
    "synchrony.shares": ("synchrony.mode", ("every_step",)),
    "synchrony.in_flight": ("synchrony.mode", SERVED),
    "synchrony.server": ("synchrony.mode", SERVED),
    "synchrony.lock": ("synchrony.mode", (ASYNCHRONOUS,)),
    "synchrony.learners": ("synchrony.clock", ("simulated",)),
    "synchrony.backup_workers": ("synchrony.mode", (BACKUP,)),
    "synchrony.dropped": ("synchrony.mode", (BACKUP,)),
    "synchrony.max_staleness": ("synchrony.mode", (STALE,)),
    "synchrony.gradients_per_update": ("synchrony.mode", (ASYNCHRONOUS,)),
    "synchrony.staleness_rate": ("synchrony.mode", (STALE, ASYNCHRONOUS)),
    "synchrony.compensate": ("synchrony.mode", (STALE, ASYNCHRONOUS)),
    "synchrony.server_momentum": ("synchrony.mode", (STALE, ASYNCHRONOUS)),
    "synchrony.warm_steps": ("synchrony.mode", (*SERVED, LOCAL)),
    "synchrony.clock": ("synchrony.mode", SERVED),
    "synchrony.speeds": ("synchrony.clock", ("simulated",)),
    "synchrony.speeds_from": ("synchrony.speeds", ("measured",)),
    "synchrony.spread": ("synchrony.speeds", ("gamma",)),
    "synchrony.slow_factor": ("synchrony.speeds", ("one_slow",)),
    "synchrony.replicas": ("synchrony.mode", (LOCAL,)),
    "synchrony.local_steps": ("synchrony.mode", (LOCAL,)),
    "synchrony.growth_coefficient": ("synchrony.mode", (LOCAL,)),
    "synchrony.warm_epochs": ("synchrony.mode", (LOCAL,)),
    "synchrony.warm_until_drop": ("synchrony.mode", (LOCAL,)),
    "synchrony.outer": ("synchrony.mode", (LOCAL,)),
    "synchrony.outer_lr": ("synchrony.outer", ("slowmo", "nesterov")),
    "synchrony.outer_momentum": ("synchrony.outer", ("slowmo", "nesterov")),
    "synchrony.inner_momentum": ("synchrony.mode", (LOCAL,)),
    "synchrony.overlap_steps": ("synchrony.mode", (LOCAL,)),
    "synchrony.fragments": ("synchrony.mode", (LOCAL,)),
    "synchrony.shares_every": ("synchrony.shares", ("measured",)),
    "prune.steps": ("prune.how", ("gradual", "surgery")),
    "prune.every": ("prune.how", ("gradual", "surgery")),
    "prune.scope": ("prune.keep", NOT_DEFAULT),
    "share.start": ("share.bits", NOT_DEFAULT),
    "share.train": ("share.bits", NOT_DEFAULT),
    "share.gradient": ("share.bits", NOT_DEFAULT),
}
"""A word, the other one that it depends on, and with which of its values it has an effect."""


def idle_words(recipe: Recipe) -> dict[str, str]:
    """The words that are not at their default and yet have no effect, each with a line that says
    why.
    """
    found, default = flatten(recipe), flatten(Recipe())
    return {
        word: _line(word, found[word], other, found[other], values)
        for word, (other, values) in COUNTS_WITH.items()
        if found[word] != default[word] and not _counts(found[other], default[other], values)
    }


def _counts(beside: Any, default: Any, values: tuple[str, ...]) -> bool:
    if values is REFERENCE:
        return is_reference(beside)
    if isinstance(beside, str) and is_caffe(beside):
        return CAFFE in values
    return beside in values if values else bool(beside != default)


def _line(word: str, value: Any, other: str, beside: Any, values: tuple[str, ...]) -> str:
    line = f"{word} {value} has no effect: {other} is {beside!r}"
    named = (f"{each}PATH" if each == CAFFE else each for each in values)
    return line + (f"; it counts with {', '.join(named)}" if values else "")
