"""A compression scheme: rounds of training in a TOML file; see docs/howto/compress.md."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from firecaffe.compression.fcz import CODES
from firecaffe.compression.prune_and_share import BIAS
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.schema import parse_toml, read_file
from firecaffe.value_checks import did_you_mean

FOLDER = Path(__file__).parent / "schemes"

SECTIONS = ("prune", "share", "solver", "train")
"""Sections of a recipe that a round may change; the others are the run's."""

CHOICES: dict[str, tuple[object, ...]] = {
    "code": CODES,
    "biases": (32, 16),
    "normalization": ("keep", "fold"),
}

Words = Mapping[str, Any]


@dataclass(frozen=True)
class SchemeRound:
    name: str
    length: float = 1.0
    """Steps, as a share of the run's."""
    rate: float = 1.0
    """base_lr, as a share of the run's."""
    prune_over: float = 0.0
    """`prune.steps` as a share of the round's steps; 0: as in the section."""
    sections: Mapping[str, Words] = field(default_factory=dict)
    """The settings that it changes, by section."""

    def has(self, section: str, word: str) -> bool:
        return word in self.sections.get(section, {})


@dataclass(frozen=True)
class Scheme:
    name: str
    rounds: Sequence[SchemeRound]
    about: str = ""
    code: str = "best"
    biases: int = 32
    normalization: str = "keep"
    low_rank: Mapping[str, Words] = field(default_factory=dict)
    """`rank` or `energy`, each by patterns of layers' names."""

    def names_biases(self, section: str, word: str) -> bool:
        tables = [
            training_round.sections.get(section, {}).get(word, {}) for training_round in self.rounds
        ]
        return any(pattern.endswith(BIAS) for table in tables for pattern in table)


def find_scheme(word: str) -> Scheme:
    """Return the scheme of a known name or a file. Raises RecipeError if it is not valid."""
    known = sorted(path.stem for path in FOLDER.glob("*.toml"))
    path = Path(word)
    if word in known:
        path = FOLDER / f"{word}.toml"
    elif path.suffix != ".toml":
        raise RecipeError(
            f"{option('scheme')} is {word!r}; there are {', '.join(known)}, or FILE.toml"
            f"{did_you_mean(word, known)}"
        )
    where = f"{option('scheme')} {word}"
    settings = read_file(path, dict[str, Any], RecipeError, parse_toml, where=where)
    return scheme_of(path.stem, settings, where)


def scheme_of(name: str, words: Words, where: str) -> Scheme:
    """Make a scheme. Errors begin with `where`. Raises RecipeError."""
    known = [entry.name for entry in fields(Scheme) if entry.name != "name"]
    _check_known(where, "", words, known)
    for word, choices in CHOICES.items():
        if words.get(word, choices[0]) not in choices:
            shown = ", ".join(map(str, choices))
            raise RecipeError(f"{where}: {word} is {words[word]!r}, expected one of {shown}")
    low_rank = _table(where, "low_rank", words.get("low_rank", {}))
    _check_known(where, "low_rank.", low_rank, ("rank", "energy"))
    if len(low_rank) > 1:
        raise RecipeError(f"{where}: low_rank has rank and energy; leave one of them out")
    for word, values in low_rank.items():
        for pattern, value in _table(where, f"low_rank.{word}", values).items():
            _check_low_rank(where, word, pattern, value)
    rows = words.get("rounds", [])
    if not isinstance(rows, list) or not rows:
        raise RecipeError(f"{where}: has no rounds; expected [[rounds]], each a training")
    rounds = [_round(where, number, row) for number, row in enumerate(rows, start=1)]
    return Scheme(
        name, rounds, **{word: words[word] for word in known if word in words and word != "rounds"}
    )


def _round(where: str, number: int, row: Any) -> SchemeRound:
    place = f"rounds {number}."
    settings = _table(where, f"rounds {number}", row)
    round_fields = [entry.name for entry in fields(SchemeRound) if entry.name != "sections"]
    _check_known(where, place, settings, [*round_fields, *SECTIONS])
    name = settings.get("name", "round")
    if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
        raise RecipeError(
            f"{where}: {place}name is {name!r}; expected letters and digits, for a folder has it"
        )
    for word, most in (("length", 1e6), ("rate", 1e6), ("prune_over", 1.0)):
        value = settings.get(word, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            limit = " and at most 1" if most == 1 else ""
            raise RecipeError(f"{where}: {place}{word} is {value!r}; it must be above 0{limit}")
    default = Recipe()
    sections = {}
    for section in SECTIONS:
        if section not in settings:
            continue
        sections[section] = _table(where, f"{place}{section}", settings[section])
        known = [entry.name for entry in fields(getattr(default, section))]
        _check_known(where, f"{place}{section}.", sections[section], known)
    numbers = {word: settings[word] for word in round_fields if word in settings and word != "name"}
    return SchemeRound(name, **numbers, sections=sections)


def _check_low_rank(where: str, word: str, pattern: str, value: Any) -> None:
    is_rank = word == "rank"
    fits = type(value) is int if is_rank else type(value) in (int, float) and 0 < value < 1
    if not fits:
        what = "a whole number" if is_rank else "above 0 and below 1"
        raise RecipeError(f"{where}: low_rank.{word} {pattern!r} is {value!r}; it must be {what}")


def _table(where: str, word: str, value: Any) -> Words:
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: {word} is {value!r}; expected a section with settings")
    return value


def _check_known(where: str, place: str, settings: Words, known: Collection[str]) -> None:
    for word in settings:
        if word not in known:
            raise RecipeError(
                f"{where}: there is no word {place}{word}; there are {', '.join(known)}"
                f"{did_you_mean(word, known)}"
            )
