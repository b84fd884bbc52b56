"""Conditions on a recipe's settings, as data: what is refused, and what has no effect.

No setting is ignored in silence. One without effect is an error if it was typed. In a recipe's file
it is reported, because an override may have made it idle.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, Literal

from firecaffe.data.config import IMAGE_WORDS
from firecaffe.exchange.choose import AUTO as AUTO_EXCHANGE
from firecaffe.exchange.route import keeps_tree_order
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.parallel.config import AUTO, ONE_WEIRD_TRICK
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.config import MAY_CYCLE
from firecaffe.synchrony.config import (
    ASYNCHRONOUS,
    BACKUP,
    EVERY_STEP,
    LOCAL,
    MEASURED,
    NO_LOCK,
    SERVED,
    SHARDED,
    STALE,
)
from firecaffe.user_code import is_caffe, is_reference

Facts = Mapping[str, Any]
"""The value of each setting, by its dotted name."""

GIVEN: dict[str, Any] = {
    "comm_hook": False,
    "model": False,
    "workers": 1,
    "hosts": 1,
    "gpus": False,
    "system": "linux",
}
"""Facts outside a recipe, with defaults: arguments of `firecaffe.train`, and the ranks."""


def words_in(recipe: Recipe) -> dict[str, Any]:
    return {
        f"{section}.{word}": value
        for section, config in vars(recipe).items()
        for word, value in vars(config).items()
    }


DEFAULTS: dict[str, Any] = {**words_in(Recipe()), **GIVEN}

SAID = {
    "workers": "{} workers",
    "hosts": "{} hosts",
    "gpus": "workers on GPUs",
    "comm_hook": "comm_hook",
    "model": "a model that is given in Python",
    "system": "ranks on {}",
}
"""Names of the facts outside a recipe, with their values."""

TOLD = {**SAID, "workers": "several workers", "hosts": "several hosts", "system": "a system"}
"""Names of the facts outside a recipe, without values."""


def facts_of(recipe: Recipe, given: Facts) -> Facts:
    return {**GIVEN, **words_in(recipe), **given}


class Default(Enum):
    DEFAULT = "default"


@dataclass(frozen=True)
class TermKind:
    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Term:
    """The condition that a setting has one of some values; or, negated, none of them."""

    word: str
    values: tuple[Any, ...] | Default
    is_negated: bool = False

    def holds(self, facts: Facts) -> bool:
        value = facts[self.word]
        if isinstance(self.values, Default):
            is_met = bool(value == DEFAULTS[self.word])
        else:
            kinds = [kind for kind in self.values if isinstance(kind, TermKind)]
            is_met = value in self.values or any(kind.holds(value) for kind in kinds)
        return is_met != self.is_negated

    def said(self, facts: Facts) -> str:
        """The setting as it stands in a recipe; `text` is the condition for people."""
        if isinstance(self.values, Default) and not self.is_negated:
            return f"no {self.word}"
        return said(self.word, facts[self.word])

    @property
    def text(self) -> str:
        word = TOLD.get(self.word, self.word)
        if isinstance(self.values, Default):
            return word if self.is_negated else f"no {word}"
        *most, last = map(shown, self.values)
        values = f"{', '.join(most)} or {last}" if most else last
        return f"{word} other than {values}" if self.is_negated else f"{word} = {values}"


@dataclass(frozen=True)
class AnyOf:
    terms: tuple[Term, ...]

    def holds(self, facts: Facts) -> bool:
        return any(term.holds(facts) for term in self.terms)

    def said(self, facts: Facts) -> str:
        return next(term for term in self.terms if term.holds(facts)).said(facts)

    @property
    def text(self) -> str:
        return ", or ".join(term.text for term in self.terms)


@dataclass(frozen=True)
class AllOf:
    conditions: tuple[Term | AnyOf, ...]

    def holds(self, facts: Facts) -> bool:
        return all(condition.holds(facts) for condition in self.conditions)

    def missed(self, facts: Facts) -> Term | AnyOf:
        """Return the first condition that does not hold."""
        return next(condition for condition in self.conditions if not condition.holds(facts))


Condition = Term | AnyOf


def combinations(when: tuple[Condition, ...]) -> list[tuple[Term, ...]]:
    return list(
        product(
            *(
                condition.terms if isinstance(condition, AnyOf) else (condition,)
                for condition in when
            )
        )
    )


def terms_of(when: tuple[Condition, ...]) -> list[Term]:
    return list(dict.fromkeys(term for combination in combinations(when) for term in combination))


def words_of(when: tuple[Condition, ...]) -> list[str]:
    return list(dict.fromkeys(term.word for term in terms_of(when)))


def is_(word: str, *values: Any) -> Term:
    return Term(word, values)


def is_not(word: str, *values: Any) -> Term:
    return Term(word, values, is_negated=True)


def on(word: str) -> Term:
    """Return the condition that a setting differs from its default."""
    return Term(word, Default.DEFAULT, is_negated=True)


def off(word: str) -> Term:
    return Term(word, Default.DEFAULT)


def any_of(*terms: Term) -> AnyOf:
    return AnyOf(terms)


def said(word: str, value: Any) -> str:
    """Return a setting with its value as in a recipe; a table or a list by its name alone."""
    if word in SAID:
        return SAID[word].format(value)
    if isinstance(value, dict | list):
        return word
    return f"{word} = {shown(value)}"


def shown(value: Any) -> str:
    if isinstance(value, TermKind):
        return value.text
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


ONE_OF_THEM = "leave one of them out"


@dataclass(frozen=True)
class Refusal:
    when: tuple[Condition, ...]
    because: str
    instead: str = ONE_OF_THEM
    # unwritten: nothing forbids the combination, but nobody has written it yet.
    kind: Literal["nature", "unwritten"] = "nature"

    @property
    def needs(self) -> Literal["words", "workers", "host"]:
        if {"hosts", "gpus", "system"} & set(self.words):
            return "host"
        return "workers" if "workers" in self.words else "words"

    def holds(self, facts: Facts) -> bool:
        return all(condition.holds(facts) for condition in self.when)

    def line(self, facts: Facts) -> str:
        first, *others = [condition.said(facts) for condition in self.when]
        return f"{first} with {' and '.join(others)}: {self.because}; {self.instead}"

    @property
    def words(self) -> list[str]:
        return words_of(self.when)

    @property
    def subjects(self) -> list[str]:
        """The settings that the row explains. Further conditions say when these count."""
        return words_of(self.when[:2])

    def text_of(self, word: str) -> str:
        """Return the row in one line, from the view of one of its settings."""
        described = (
            term.text.removeprefix(word) for term in terms_of(self.when) if term.word == word
        )
        detail = " and ".join(filter(None, described)).strip()
        others = [condition.text for condition in self.when if word not in words_of((condition,))]
        return f"{detail and f'{detail}: '}not with {' and '.join(others)}: {self.because}"


OWN_CODE = TermKind("code of your own", is_reference)
CAFFES_NET = TermKind("caffe:PATH", is_caffe)


def _leaves_the_tree(algorithm: str) -> bool:
    return algorithm != AUTO_EXCHANGE and not keeps_tree_order(algorithm)


OUT_OF_ORDER = TermKind("one that leaves the tree's order", _leaves_the_tree)


def _needs_all(compressor: str) -> bool:
    # Codecs load torch, which reading a recipe does not need.
    from firecaffe.gradients.compressors import ONE_BY_ONE

    return compressor not in (NO_COMPRESSOR, *ONE_BY_ONE)


OF_MANY_LENGTHS = TermKind("threshold or power_sgd", _needs_all)

CODEC = on("exchange.compressor")
FLOAT16 = is_("train.autocast", "float16")
SHARES = is_("synchrony.shares", MEASURED)
BY_SERVER = is_("synchrony.mode", *SERVED)
LATE = is_("synchrony.mode", STALE, ASYNCHRONOUS)
IN_REPLICAS = is_("synchrony.mode", LOCAL)
NOT_EVERY_STEP = is_not("synchrony.mode", EVERY_STEP)
SHARDED_SERVER = (is_("synchrony.server", SHARDED), BY_SERVER)
REAL_CLOCK = is_("synchrony.clock", "real")
LOCKLESS = (is_("synchrony.lock", NO_LOCK), is_("synchrony.mode", ASYNCHRONOUS))
SIMULATED = (is_("synchrony.clock", "simulated"), BY_SERVER)
IN_SHARDS = is_("exchange.update_at", "shards")
SPLIT = any_of(on("parallel.split"), is_("parallel.scheme", ONE_WEIRD_TRICK, AUTO))
ROW = any_of(*SPLIT.terms, on("parallel.stages"))
CONSTRAINED = any_of(on("prune.keep"), on("prune.threshold"), on("share.bits"))
TRANSFORMS = tuple(on(f"data.{word}") for word in IMAGE_WORDS)
OWN_SOLVER = is_("solver.type", OWN_CODE)


def all_of(*conditions: Condition) -> AllOf:
    return AllOf(conditions)


COUNTS_WITH: dict[str, Condition | AllOf] = {
    "data.args": is_("data.name", OWN_CODE),
    "task.args": is_not("task.name", CAFFES_NET),
    "parallel.parts": SPLIT,
    "parallel.model": ROW,
    "prune.how": any_of(on("prune.keep"), on("prune.threshold")),
    "solver.momentum_correction": all_of(
        is_("solver.momentum_form", "caffe"), is_("solver.type", "sgd", "nesterov")
    ),
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
"""Settings, each with the condition on another one under which it has an effect."""


def idle_words(recipe: Recipe) -> dict[str, str]:
    """Return the settings that differ from their default without effect, each with the reason."""
    facts = facts_of(recipe, {})
    return {
        word: _line(word, counts_with, facts)
        for word, counts_with in COUNTS_WITH.items()
        if facts[word] != DEFAULTS[word] and not counts_with.holds(facts)
    }


def _line(word: str, counts_with: Condition | AllOf, facts: Facts) -> str:
    missed = counts_with.missed(facts) if isinstance(counts_with, AllOf) else counts_with
    others = words_of((missed,))
    said = " and ".join(f"{other} is {facts[other]!r}" for other in others)
    line = f"{word} {facts[word]} has no effect: {said}"
    described, other = missed.text, others[0]
    return line if described == other else f"{line}; it counts with {described}"
