"""Settings that have no effect together with other settings, in one table.

No setting is ignored in silence. A setting without effect is an error if it was typed. In a
recipe's file it is only reported, because an override may have made it idle.
"""

from typing import Any

from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.terms import (
    CAFFE_NET,
    DEFAULTS,
    OWN_CODE,
    REAL_CLOCK,
    ROW,
    SPLIT,
    AllOf,
    Condition,
    Facts,
    all_of,
    any_of,
    facts_of,
    is_,
    is_not,
    on,
    words_of,
)
from firecaffe.solvers.config import MAY_CYCLE
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, LOCAL, SERVED, STALE

EFFECTIVE_IF: dict[str, Condition | AllOf] = {
    "data.args": is_("data.name", OWN_CODE),
    "task.args": is_not("task.name", CAFFE_NET),
    "parallel.parts": SPLIT,
    "parallel.model": ROW,
    "prune.how": any_of(on("prune.keep"), on("prune.threshold")),
    "solver.momentum_correction": all_of(
        is_("solver.momentum_form", "caffe"), is_("solver.type", "sgd", "nesterov")
    ),
    "data.path": is_(
        "data.name", "fashion-mnist", "mnist", "cifar10", "folder", "packed", CAFFE_NET
    ),
    "data.resize": is_("data.name", "folder", "packed"),
    "data.decode_threads": is_("data.name", "folder", "packed", CAFFE_NET),
    "data.on_error": is_("data.name", "folder", "packed"),
    "data.exif": is_("data.name", "folder", "packed"),
    "data.cache": is_("data.name", "packed"),
    "data.cache_bytes": on("data.cache"),
    "data.mirror": is_("data.augment", "caffe", "inception"),
    "task.label_smoothing": is_("task.name", "classification", "segmentation"),
    "task.class_weights": is_("task.name", "classification", "multilabel", "segmentation"),
    "train.stop_after": on("train.eval_every"),
    "train.ema_warmup": on("train.ema_decay"),
    "checkpoint.best": on("train.eval_every"),
    "solver.args": is_("solver.type", OWN_CODE),
    "solver.gamma": is_("solver.lr_policy", "step", "exp", "inv", "multistep", "sigmoid"),
    "solver.power": is_("solver.lr_policy", "inv", "poly"),
    "solver.stepsize": is_("solver.lr_policy", "step", "sigmoid"),
    "solver.stepvalue": is_("solver.lr_policy", "multistep"),
    "solver.pct_start": is_("solver.lr_policy", "one_cycle"),
    "solver.div_factor": is_("solver.lr_policy", "one_cycle"),
    "solver.final_div_factor": is_("solver.lr_policy", "one_cycle"),
    "solver.base_momentum": all_of(
        is_("solver.lr_policy", "one_cycle"), is_("solver.type", *MAY_CYCLE)
    ),
    "solver.reference_batch_size": on("solver.scale"),
    "solver.momentum": is_(
        "solver.type", "sgd", "nesterov", "adadelta", "adam", "adamw", "lars", "lamb"
    ),
    "solver.momentum2": is_("solver.type", "adam", "adamw", "lamb"),
    "solver.trust": is_("solver.type", "lars"),
    "solver.rms_decay": is_("solver.type", "rmsprop"),
    "solver.delta": is_("solver.type", "adagrad", "adadelta", "rmsprop", "adam", "adamw", "lamb"),
    "solver.decay_form": on("solver.weight_decay"),
    "solver.decay_mult": on("solver.weight_decay"),
    "exchange.compressor_level": on("exchange.compressor"),
    "synchrony.shares": is_("synchrony.mode", "every_step"),
    "synchrony.in_flight": all_of(is_("synchrony.mode", *SERVED), REAL_CLOCK),
    "synchrony.server": all_of(is_("synchrony.mode", *SERVED), REAL_CLOCK),
    "synchrony.lock": all_of(is_("synchrony.mode", ASYNCHRONOUS), REAL_CLOCK),
    "synchrony.learners": is_("synchrony.clock", "simulated"),
    "synchrony.backup_workers": is_("synchrony.mode", BACKUP),
    "synchrony.dropped": is_("synchrony.mode", BACKUP),
    "synchrony.max_staleness": is_("synchrony.mode", STALE),
    "synchrony.gradients_per_update": is_("synchrony.mode", ASYNCHRONOUS),
    "synchrony.staleness_rate": is_("synchrony.mode", STALE, ASYNCHRONOUS),
    "synchrony.compensate": is_("synchrony.mode", STALE, ASYNCHRONOUS),
    "synchrony.server_momentum": is_("synchrony.mode", STALE, ASYNCHRONOUS),
    "synchrony.warm_steps": is_("synchrony.mode", *SERVED, LOCAL),
    "synchrony.clock": is_("synchrony.mode", *SERVED),
    "synchrony.speeds": is_("synchrony.clock", "simulated"),
    "synchrony.speeds_from": is_("synchrony.speeds", "measured"),
    "synchrony.spread": is_("synchrony.speeds", "gamma"),
    "synchrony.slow_factor": is_("synchrony.speeds", "one_slow"),
    "synchrony.replicas": is_("synchrony.mode", LOCAL),
    "synchrony.local_steps": is_("synchrony.mode", LOCAL),
    "synchrony.growth_coefficient": is_("synchrony.mode", LOCAL),
    "synchrony.warm_epochs": is_("synchrony.mode", LOCAL),
    "synchrony.warm_until_drop": is_("synchrony.mode", LOCAL),
    "synchrony.outer": is_("synchrony.mode", LOCAL),
    "synchrony.outer_lr": is_("synchrony.outer", "slowmo", "nesterov"),
    "synchrony.outer_momentum": is_("synchrony.outer", "slowmo", "nesterov"),
    "synchrony.inner_momentum": is_("synchrony.mode", LOCAL),
    "synchrony.overlap_steps": is_("synchrony.mode", LOCAL),
    "synchrony.fragments": is_("synchrony.mode", LOCAL),
    "synchrony.shares_every": is_("synchrony.shares", "measured"),
    "prune.steps": is_("prune.how", "gradual", "surgery"),
    "prune.every": is_("prune.how", "gradual", "surgery"),
    "prune.scope": on("prune.keep"),
    "share.start": on("share.bits"),
    "share.train": on("share.bits"),
    "share.gradient": on("share.bits"),
}
"""Settings, each with the condition on others under which it has an effect."""

ALWAYS = all_of()


def with_effect(facts: Facts) -> Facts:
    """Return the facts, with the default for each setting that has no effect with the others."""
    effective: dict[str, Any] = {}

    def value(word: str) -> Any:
        if word not in effective:
            condition = EFFECTIVE_IF.get(word, ALWAYS)
            others = {other: value(other) for other in words_of((condition,))}
            effective[word] = facts[word] if condition.holds(others) else DEFAULTS[word]
        return effective[word]

    return {word: value(word) for word in facts}


def idle_settings(recipe: Recipe) -> dict[str, str]:
    """Return the settings that differ from their default without effect, each with the reason."""
    facts = facts_of(recipe, {})
    effective = with_effect(facts)
    return {
        word: _line(word, condition, facts, effective)
        for word, condition in EFFECTIVE_IF.items()
        if facts[word] != effective[word]
    }


def _line(word: str, condition: Condition | AllOf, facts: Facts, effective: Facts) -> str:
    missed = condition.missed(effective) if isinstance(condition, AllOf) else condition
    others = words_of((missed,))
    said = " and ".join(
        f"{other} is {facts[other]!r}"
        + ("" if facts[other] == effective[other] else ", which has none either")
        for other in others
    )
    line = f"{word} {facts[word]} has no effect: {said}"
    described, other = missed.text, others[0]
    return line if described == other else f"{line}; it counts with {described}"
