"""Conditions on a recipe's settings, as data, for what is refused and what has no effect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from firecaffe.data import IMAGE_WORDS
from firecaffe.exchange import AUTO as AUTO_EXCHANGE
from firecaffe.exchange.route import keeps_tree_order
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.parallel.config import AUTO, ONE_WEIRD_TRICK
from firecaffe.recipe.sections import Recipe, flatten
from firecaffe.synchrony.config import EVERY_STEP, LOCAL, MEASURED, NO_LOCK, SERVED, SHARDED
from firecaffe.user_code import is_caffe, is_reference

Facts = Mapping[str, Any]
"""The value of each setting, by its dotted name."""

GIVEN: dict[str, Any] = {
    "comm_hook": False,
    "model": False,
    "validation_set": False,
    "workers": 1,
    "hosts": 1,
    "gpus": False,
    "system": "linux",
}
"""Facts outside a recipe, with defaults: arguments of `firecaffe.train`, and the ranks."""


DEFAULTS: dict[str, Any] = {**flatten(Recipe()), **GIVEN}

SAID = {
    "workers": "{} workers",
    "hosts": "{} hosts",
    "gpus": "workers on GPUs",
    "comm_hook": "comm_hook",
    "model": "a model that is given in Python",
    "validation_set": "validation_set",
    "system": "ranks on {}",
}
"""Names of the facts outside a recipe, with their values."""

TOLD = {**SAID, "workers": "several workers", "hosts": "several hosts", "system": "a system"}
"""Names of the facts outside a recipe, without values."""


def facts_of(recipe: Recipe, given: Facts) -> Facts:
    return {**GIVEN, **flatten(recipe), **given}


@dataclass(frozen=True)
class TermKind:
    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Term:
    """The condition that a setting has one of some values; or, negated, none of them."""

    word: str
    values: tuple[Any, ...]
    is_negated: bool = False

    def holds(self, facts: Facts) -> bool:
        return self._fits(facts[self.word]) != self.is_negated

    def _fits(self, value: Any) -> bool:
        kinds = [kind for kind in self.values if isinstance(kind, TermKind)]
        return value in self.values or any(kind.holds(value) for kind in kinds)

    @property
    def every(self) -> "tuple[Term, ...]":
        return (self,)

    def said(self, facts: Facts) -> str:
        """Return the setting as a recipe has it; `text` is the condition for people."""
        return said(self.word, facts[self.word])

    @property
    def text(self) -> str:
        word = TOLD.get(self.word, self.word)
        *most, last = map(shown, self.values)
        values = f"{', '.join(most)} or {last}" if most else last
        return f"{word} other than {values}" if self.is_negated else f"{word} = {values}"


class DefaultTerm(Term):
    """The condition that a setting has its default; or, negated, another value."""

    def _fits(self, value: Any) -> bool:
        return bool(value == DEFAULTS[self.word])

    def said(self, facts: Facts) -> str:
        return super().said(facts) if self.is_negated else f"no {self.word}"

    @property
    def text(self) -> str:
        word = TOLD.get(self.word, self.word)
        return word if self.is_negated else f"no {word}"


@dataclass(frozen=True)
class AnyOf:
    terms: tuple[Term, ...]

    @property
    def every(self) -> tuple[Term, ...]:
        return self.terms

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

    @property
    def every(self) -> tuple[Term, ...]:
        return tuple(term for condition in self.conditions for term in condition.every)

    def holds(self, facts: Facts) -> bool:
        return all(condition.holds(facts) for condition in self.conditions)

    def missed(self, facts: Facts) -> Term | AnyOf:
        return next(condition for condition in self.conditions if not condition.holds(facts))


Condition = Term | AnyOf


def combinations(when: tuple[Condition, ...]) -> list[tuple[Term, ...]]:
    return list(product(*(condition.every for condition in when)))


def words_of(when: tuple[Condition | AllOf, ...]) -> list[str]:
    return list(dict.fromkeys(term.word for condition in when for term in condition.every))


def is_(word: str, *values: Any) -> Term:
    return Term(word, values)


def is_not(word: str, *values: Any) -> Term:
    return Term(word, values, is_negated=True)


def on(word: str) -> Term:
    """Return the condition that a setting differs from its default."""
    return DefaultTerm(word, (), is_negated=True)


def off(word: str) -> Term:
    return DefaultTerm(word, ())


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
    # unwritten: nothing forbids the combination, but it is not implemented yet.
    kind: Literal["nature", "unwritten"] = "nature"

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
        """Return the row in one line, from the point of view of one of its settings."""
        terms = AllOf(self.when).every
        described = (term.text.removeprefix(word) for term in terms if term.word == word)
        detail = " and ".join(filter(None, described)).strip()
        others = [condition.text for condition in self.when if word not in words_of((condition,))]
        return f"{detail and f'{detail}: '}not with {' and '.join(others)}: {self.because}"


OWN_CODE = TermKind("code of your own", is_reference)
CAFFE_NET = TermKind("caffe:PATH", is_caffe)


def _leaves_the_tree(algorithm: str) -> bool:
    return algorithm != AUTO_EXCHANGE and not keeps_tree_order(algorithm)


OUT_OF_ORDER = TermKind("one that leaves the tree's order", _leaves_the_tree)


def _needs_all(compressor: str) -> bool:
    # Codecs load torch, which reading a recipe does not need.
    from firecaffe.gradients.compressors import FIXED_LENGTH

    return compressor not in (NO_COMPRESSOR, *FIXED_LENGTH)


VARIABLE_LENGTH = TermKind("threshold or power_sgd", _needs_all)

CODEC = on("exchange.compressor")
FLOAT16 = is_("train.autocast", "float16")
SHARES = is_("synchrony.shares", MEASURED)
BY_SERVER = is_("synchrony.mode", *SERVED)
IN_REPLICAS = is_("synchrony.mode", LOCAL)
NOT_EVERY_STEP = is_not("synchrony.mode", EVERY_STEP)
SHARDED_SERVER = is_("synchrony.server", SHARDED)
REAL_CLOCK = is_("synchrony.clock", "real")
LOCKLESS = is_("synchrony.lock", NO_LOCK)
SIMULATED = is_("synchrony.clock", "simulated")
IN_SHARDS = is_("exchange.update_at", "shards")
SPLIT = any_of(on("parallel.split"), is_("parallel.scheme", ONE_WEIRD_TRICK, AUTO))
ROW = any_of(*SPLIT.terms, on("parallel.stages"))
CONSTRAINED = any_of(on("prune.keep"), on("prune.threshold"), on("share.bits"))
TRANSFORMS = tuple(on(f"data.{word}") for word in IMAGE_WORDS)
OWN_SOLVER = is_("solver.type", OWN_CODE)


def all_of(*conditions: Condition) -> AllOf:
    return AllOf(conditions)
