"""Settings that have no effect with others, as a codec's level without a codec.

None is ignored in silence. A typed one is an error. One in a recipe's file is reported, because an
override may have made it idle.
"""

from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.terms import CAFFES_NET, DEFAULTS, OWN_CODE, Facts, Term, facts_of, is_, on
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, LOCAL, SERVED, STALE

COUNTS_WITH: dict[str, Term] = {
    "data.path": is_(
        "data.name", "fashion-mnist", "mnist", "cifar10", "folder", "packed", CAFFES_NET
    ),
    "data.resize": is_("data.name", "folder", "packed"),
    "data.decode_threads": is_("data.name", "folder", "packed", CAFFES_NET),
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
    "solver.base_momentum": is_("solver.lr_policy", "one_cycle"),
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
    "synchrony.in_flight": is_("synchrony.mode", *SERVED),
    "synchrony.server": is_("synchrony.mode", *SERVED),
    "synchrony.lock": is_("synchrony.mode", ASYNCHRONOUS),
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
"""Settings, each with the condition on another one under which it has an effect."""


def idle_words(recipe: Recipe) -> dict[str, str]:
    """Return the settings that differ from their default without effect, each with the reason."""
    facts = facts_of(recipe, {})
    return {
        word: _line(word, counts_with, facts)
        for word, counts_with in COUNTS_WITH.items()
        if facts[word] != DEFAULTS[word] and not counts_with.holds(facts)
    }


def _line(word: str, counts_with: Term, facts: Facts) -> str:
    other = counts_with.word
    line = f"{word} {facts[word]} has no effect: {other} is {facts[other]!r}"
    described = counts_with.text
    return line if described == other else f"{line}; it counts with {described}"
