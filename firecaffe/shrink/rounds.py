"""The trainings of a scheme: each an ordinary run, from the weights of the one before."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from firecaffe.compression.config import PruneConfig, ShareConfig
from firecaffe.compression.layers import BIAS
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.measure import TOP1, Measure
from firecaffe.shrink.layers import Choice, LayerChoice
from firecaffe.shrink.scheme import Round, Scheme, Words
from firecaffe.solvers.config import SolverConfig
from firecaffe.training.trial import Trial

POLICY = "cosine"
"""How the rate of a round falls unless it says otherwise: the places at which a run's own policy
changes it are of another length.
"""


def rounds_of(
    recipe: Recipe,
    scheme: Scheme,
    steps: int,
    folder: Path,
    choice: Choice | None = None,
    measure: Measure = TOP1,
) -> list[Trial]:
    """The trainings in their order, as they lie in a folder.

    recipe: the run's; `model.weights` is where the trained weights are. steps: those of the run.
    choice: of layers, in place of the scheme's own `prune.keep` and `share.bits`.

    Raises: RecipeError if the words of a round do not go together.
    """
    trials: list[Trial] = []
    weights = recipe.model.weights
    own = (("prune", recipe.prune), ("share", recipe.share))
    sections: dict[str, Words] = {name: asdict(words) for name, words in own if words.is_on}
    for number, (each, chosen) in enumerate(_chosen(scheme.rounds, choice), start=1):
        sections = _kept_on(sections) | chosen
        trained = _round_recipe(recipe, each, sections, steps, weights)
        trials.append(Trial(f"{number}-{each.name}", trained, folder, measure))
        weights = str(trials[-1].folder)
    return trials


def _chosen(rounds: Sequence[Round], choice: Choice | None) -> list[tuple[Round, dict[str, Words]]]:
    """Each round with the words that it changes. Of several that prune, each keeps the same part of
    what the one before has kept.
    """
    prunes = [
        each for each in rounds if each.has("prune", "keep") or each.has("prune", "threshold")
    ]
    found = []
    for each in rounds:
        words = dict(each.sections)
        if choice is not None and each in prunes:
            part = (prunes.index(each) + 1) / len(prunes)
            keep = {layer: one.keep**part for layer, one in _meant(choice, each, "prune", "keep")}
            chosen = {"keep": keep, "scope": "layer"}
            words["prune"] = _without(words["prune"], "threshold") | chosen
        if choice is not None and each.has("share", "bits"):
            bits = {layer: one.bits for layer, one in _meant(choice, each, "share", "bits")}
            words["share"] = {**words["share"], "bits": bits}
        found.append((each, words))
    return found


def _kept_on(sections: Mapping[str, Words]) -> dict[str, Words]:
    """What a later round keeps of an earlier one, unless it says otherwise: weights that are zero
    stay zero, and values stay shared.
    """
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
    each: Round,
    sections: Mapping[str, Words],
    steps: int,
    weights: str,
) -> Recipe:
    train = replace(recipe.train, steps=max(1, round(each.length * steps)), epochs=0, stop_after=0)
    words = dict(sections.get("train", {}))
    if "epochs" in words:
        words = {"steps": 0, **words}
    train = replace(train, **words)
    rate = recipe.solver.base_lr * each.rate
    solver = _with_policy(recipe.solver, sections.get("solver", {}), rate)
    prune = dict(sections.get("prune", {}))
    if each.prune_over:
        if not train.steps:
            raise RecipeError(
                f"round {each.name!r}: prune_over is a share of its steps, which "
                "train.epochs leaves open; say length, or train.steps"
            )
        prune["steps"] = max(1, round(each.prune_over * train.steps))
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


def _with_policy(run: SolverConfig, words: Mapping[str, Any], rate: float) -> SolverConfig:
    default = SolverConfig()
    fresh = {
        word: getattr(default, word)
        for word in ("gamma", "power", "stepsize", "stepvalue", "warmup_steps", "base_momentum")
    }
    fresh |= {"base_lr": rate, "lr_policy": POLICY, **words}
    return replace(run, **fresh)


def _meant(choice: Choice, each: Round, section: str, word: str) -> list[tuple[str, LayerChoice]]:
    """The choice without biases, if the round's own patterns mean none."""
    own = each.sections[section].get(word, {})
    has_biases = any(pattern.endswith(BIAS) for pattern in own)
    return [(name, one) for name, one in choice.items() if has_biases or not name.endswith(BIAS)]


def _without(words: Mapping[str, Any], word: str) -> dict[str, Any]:
    return {name: value for name, value in words.items() if name != word}
