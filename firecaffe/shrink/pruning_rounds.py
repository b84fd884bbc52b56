"""The trainings of a scheme, and the choice of the next size to try.

Each training is an ordinary run from the weights of the previous one. The next size depends on
finished attempts only, so a restarted search tries the same sizes and reuses their trainings.
Attempts are compared only on held-out training samples.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, Literal

from firecaffe.compression import PruneConfig, ShareConfig
from firecaffe.compression.prune_and_share import BIAS
from firecaffe.compression.transfer import BYTES_PER_WEIGHT
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.runs.measure import TOP1, Measure
from firecaffe.shrink.layer_sizes import Choice, LayerChoice
from firecaffe.shrink.scheme import Scheme, SchemeRound, Words
from firecaffe.solvers.config import SolverConfig
from firecaffe.training.trial import Trial

# The run's own policy is for a training of another length.
POLICY = "cosine"


def rounds_of(
    recipe: Recipe,
    scheme: Scheme,
    steps: int,
    folder: Path,
    choice: Choice | None = None,
    measure: Measure = TOP1,
) -> list[Trial]:
    """Return the trainings in order, as runs in `folder`. Raises RecipeError.

    `recipe` is the run's, with the trained weights in `model.weights`; `steps` is the run's length.
    `choice` replaces the scheme's `prune.keep` and `share.bits`.
    """
    trials: list[Trial] = []
    weights = recipe.model.weights
    configs = (("prune", recipe.prune), ("share", recipe.share))
    sections: dict[str, Words] = {name: asdict(config) for name, config in configs if config.is_on}
    for number, (training_round, chosen) in enumerate(_with_choice(scheme.rounds, choice), start=1):
        sections = _carried_over(sections) | chosen
        trained = _round_recipe(recipe, training_round, sections, steps, weights)
        trials.append(Trial(f"{number}-{training_round.name}", trained, folder, measure))
        weights = str(trials[-1].folder)
    return trials


def _with_choice(
    rounds: Sequence[SchemeRound], choice: Choice | None
) -> list[tuple[SchemeRound, dict[str, Words]]]:
    # If several rounds prune, each keeps the same share of the weights that the previous one kept.
    prunes = [
        training_round
        for training_round in rounds
        if training_round.has("prune", "keep") or training_round.has("prune", "threshold")
    ]
    pairs = []
    for training_round in rounds:
        sections = dict(training_round.sections)
        if choice is not None and training_round in prunes:
            part = (prunes.index(training_round) + 1) / len(prunes)
            keep = {
                layer: one.keep**part
                for layer, one in _meant(choice, training_round, "prune", "keep")
            }
            others = {word: v for word, v in sections["prune"].items() if word != "threshold"}
            sections["prune"] = {**others, "keep": keep, "scope": "layer"}
        if choice is not None and training_round.has("share", "bits"):
            bits = {
                layer: one.bits for layer, one in _meant(choice, training_round, "share", "bits")
            }
            sections["share"] = {**sections["share"], "bits": bits}
        pairs.append((training_round, sections))
    return pairs


def _carried_over(sections: Mapping[str, Words]) -> dict[str, Words]:
    # By default, a later round keeps zeros at 0, and values shared.
    kept: dict[str, Words] = {}
    prune = sections.get("prune", {})
    patterns = [*prune.get("keep", {}), *prune.get("threshold", {})]
    if patterns:
        kept["prune"] = {"keep": dict.fromkeys(patterns, 1.0)}
    if "share" in sections:
        kept["share"] = sections["share"]
    return kept


def _round_recipe(
    recipe: Recipe,
    training_round: SchemeRound,
    sections: Mapping[str, Words],
    steps: int,
    weights: str,
) -> Recipe:
    train = replace(
        recipe.train, steps=max(1, round(training_round.length * steps)), epochs=0, stop_after=0
    )
    settings = dict(sections.get("train", {}))
    if "epochs" in settings:
        settings = {"steps": 0, **settings}
    train = replace(train, **settings)
    rate = recipe.solver.base_lr * training_round.rate
    solver = _with_policy(recipe.solver, sections.get("solver", {}), rate)
    prune = dict(sections.get("prune", {}))
    if training_round.prune_over:
        if not train.steps:
            raise RecipeError(
                f"round {training_round.name!r}: prune_over is a share of its steps, which "
                "train.epochs leaves open; say length, or train.steps"
            )
        prune["steps"] = max(1, round(training_round.prune_over * train.steps))
    checkpoint = replace(recipe.checkpoint, every=0, every_s=0.0, keep_last=1, best=False)
    return replace(
        recipe,
        model=replace(recipe.model, weights=weights),
        train=train,
        solver=solver,
        prune=replace(PruneConfig(), **prune),
        share=replace(ShareConfig(), **sections.get("share", {})),
        checkpoint=checkpoint,
        run=replace(recipe.run, folder="", tuned=""),
    )


def _with_policy(run: SolverConfig, settings: Mapping[str, Any], rate: float) -> SolverConfig:
    default = SolverConfig()
    fresh = {
        word: getattr(default, word)
        for word in ("gamma", "power", "stepsize", "stepvalue", "warmup_steps", "base_momentum")
    }
    fresh |= {"base_lr": rate, "lr_policy": POLICY, **settings}
    return replace(run, **fresh)


def _meant(
    choice: Choice, training_round: SchemeRound, section: str, word: str
) -> list[tuple[str, LayerChoice]]:
    """Return the choices by layer, without biases if the round's own patterns name none."""
    patterns = training_round.sections[section].get(word, {})
    has_biases = any(pattern.endswith(BIAS) for pattern in patterns)
    return [(name, one) for name, one in choice.items() if has_biases or not name.endswith(BIAS)]


UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

EXPECTED = "expected a ratio (40x), a size (27KB) or the accuracy that may be lost (0.1points)"


@dataclass(frozen=True)
class Target:
    """The target of a compression: a ratio, a size, or the points that may be lost."""

    word: str
    kind: Literal["ratio", "bytes", "points"]
    value: float

    @property
    def is_of_size(self) -> bool:
        return self.kind != "points"

    def most_bytes(self, weights: int) -> float:
        """Return the largest allowed file for a network of this many weights."""
        return self.value if self.kind == "bytes" else weights * BYTES_PER_WEIGHT / self.value


def parse_target(word: str) -> Target:
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]+)\s*", word)
    if match is None:
        raise RecipeError(f"{option('target')} is {word!r}; {EXPECTED}")
    value, unit = float(match[1]), match[2].upper()
    if not isfinite(value):
        raise RecipeError(
            f"{option('target')} is {word:.20}…, which is too large a number; {EXPECTED}"
        )
    if unit == "X":
        if value <= 1:
            raise RecipeError(f"{option('target')} is {word}; a ratio must be more than 1")
        return Target(word, "ratio", value)
    if unit in ("POINT", "POINTS"):
        return Target(word, "points", value)
    if unit not in UNITS:
        raise RecipeError(f"{option('target')} is {word!r}, in an unknown unit; {EXPECTED}")
    if value * UNITS[unit] < 1:
        raise RecipeError(f"{option('target')} is {word}; a size must be at least one byte")
    return Target(word, "bytes", value * UNITS[unit])


MAX_ATTEMPTS_OF_SIZE = 3
MAX_ATTEMPTS_OF_LOSS = 6

CLOSE = 0.95
"""A file of at least this share of the allowed size is large enough."""

MARGIN = 0.99
"""Factor of the next aim after a missed size, so that it is not missed by a byte."""

FIRST_RATIO, STEP = 20.0, 2.0
"""The first ratio tried for a target loss, and its growth while the loss is allowed."""

FINE = 1.12
"""The search ends if allowed and lost ratios differ by less than this factor."""

ROUNDING = 1e-9


@dataclass(frozen=True)
class Attempt:
    aim_bytes: float
    bytes: int
    lost: float
    """The loss on held-out samples in the target's unit, points of a share; gains are negative."""


def next_aim(target: Target, attempts: Sequence[Attempt], weights: int) -> float | None:
    """Return the next size to aim at, in bytes; None if there is nothing more to try."""
    by_kind = _aim_of_size if target.is_of_size else _aim_of_loss
    return by_kind(target, attempts, weights)


def _aim_of_size(target: Target, attempts: Sequence[Attempt], weights: int) -> float | None:
    wanted = target.most_bytes(weights)
    if not attempts:
        return wanted
    last = attempts[-1]
    is_met = CLOSE * wanted <= last.bytes <= wanted
    if is_met or len(attempts) == MAX_ATTEMPTS_OF_SIZE:
        return None
    return last.aim_bytes * wanted / last.bytes * MARGIN


def _aim_of_loss(target: Target, attempts: Sequence[Attempt], weights: int) -> float | None:
    whole = float(weights * BYTES_PER_WEIGHT)
    if not attempts:
        return whole / FIRST_RATIO
    if len(attempts) == MAX_ATTEMPTS_OF_LOSS:
        return None
    lost = [attempt.aim_bytes for attempt in attempts if not is_kept(target, attempt, weights)]
    largest_lost = max(lost, default=0.0)
    kept = [attempt.aim_bytes for attempt in attempts if is_kept(target, attempt, weights)]
    if not lost:
        return min(kept) / STEP
    if not kept:
        return None if largest_lost * STEP >= whole else largest_lost * STEP
    if min(kept) / largest_lost < FINE:
        return None
    return sqrt(min(kept) * largest_lost)


def is_kept(target: Target, attempt: Attempt, weights: int) -> bool:
    if target.is_of_size:
        return attempt.bytes <= target.most_bytes(weights)
    return attempt.lost <= target.value + ROUNDING


def best_of(target: Target, attempts: Sequence[Attempt], weights: int) -> tuple[int, bool]:
    """Return the best attempt's index, and whether it reaches the target; else the nearest."""
    places = range(len(attempts))
    reaching = [place for place in places if is_kept(target, attempts[place], weights)]
    if target.is_of_size:
        if reaching:
            return min(reaching, key=lambda place: attempts[place].lost), True
        return min(places, key=lambda place: attempts[place].bytes), False
    if reaching:
        return min(reaching, key=lambda place: attempts[place].bytes), True
    return min(places, key=lambda place: attempts[place].lost), False
