"""Compositions of holdings, updates, modes and the words that touch sums, and what is to come out.

A case is a value for each axis: words that decide bits, a composition that is killed on the way,
and another that goes on. In the cases of matrix.json every pair of values stands that the check of
recipes does not refuse, as this finds them:

    python -m tests.ranks.matrix
"""

import dataclasses
import json
import os
import random
import time
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

import firecaffe
from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    ParallelConfig,
    PruneConfig,
    Recipe,
    RunConfig,
    ShareConfig,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.errors import PeerLostError, RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.worker_numbers import check_ranks
from firecaffe.training.given_parts import Parts
from firecaffe.training.modes import every_step
from firecaffe.training.outcome import Timings
from tests.ranks.killed import killed
from tests.ranks.networks import small_data
from tests.ranks.pairwise import Case, Pairwise

HEAD = {"classifier.*": "neurons", "classifier.3": "inputs"}
PARTS = 4

HOLDINGS = {
    "whole": ParallelConfig(),
    "split": ParallelConfig(0, 2, HEAD, PARTS),
    "trick": ParallelConfig(0, 2, HEAD, PARTS, "one_weird_trick"),
    "stages": ParallelConfig(stages=["features.4"]),
    "split stages": ParallelConfig(0, 2, HEAD, PARTS, stages=["classifier.1"]),
}

MODES: dict[str, dict[str, Any]] = {
    "every_step": {},
    "local": {"mode": "local", "replicas": 2, "local_steps": 3, "outer": "nesterov"},
    "backup": {"mode": "backup"},
    "stale": {"mode": "stale", "max_staleness": 2},
    "asynchronous": {"mode": "asynchronous"},
    "sharded": {"mode": "asynchronous", "server": "sharded"},
    "lockless": {"mode": "asynchronous", "lock": "none"},
}

PRUNES = {
    "none": PruneConfig(),
    "at the start": PruneConfig({"*": 0.5}),
    "surgery": PruneConfig({"*": 0.5}, how="surgery", steps=4, every=2),
    "of all": PruneConfig({"*": 0.5}, how="gradual", steps=4, every=2, scope="all"),
}

SHARES = {"none": ShareConfig(), "2 bits": ShareConfig({"*": 2})}
SHARES["fixed"] = ShareConfig({"*": 2}, train=False)

REPEATED = ("every_step", "local")
"""Modes whose bits are those of one worker. Others are replayed, but for `UNREPEATED`."""

UNREPEATED = "lockless"

WORDS: dict[str, Sequence[Any]] = {
    "mode": tuple(MODES),
    "codec": ("none", "bfloat16", "one_bit"),
    "autocast": ("none", "float16", "bfloat16"),
    "clip": (0.0, 0.05),
    "solver": ("sgd", "lars"),
    "average": (0.0, 0.8),
}
"""What decides bits. The first value of an axis is what stands in where none is said."""

BESIDE: dict[str, Sequence[Any]] = {
    "train.batch_norm_samples": (0, 16),
    "train.channels_last": (False, True),
    "train.ema_warmup": (False, True),
    "solver.lr_policy": ("fixed", "poly"),
    "solver.momentum_form": ("torch", "caffe"),
    "solver.momentum_correction": (False, True),
    "solver.decay_form": ("l2", "decoupled"),
    "exchange.compressor_level": (0, 1),
    "data.mixup": (0.0, 0.5),
    "task.label_smoothing": (0.0, 0.1),
    "synchrony.warm_steps": (0, 2),
    "synchrony.fragments": (1, 3),
    "synchrony.overlap_steps": (0, 1),
    "synchrony.inner_momentum": ("keep", "average"),
    "synchrony.in_flight": (1, 2),
    "synchrony.dropped": ("forget", "again"),
    "synchrony.staleness_rate": ("none", "inverse"),
    "synchrony.compensate": ("none", "delay", "gap"),
    "prune": tuple(PRUNES),
    "share": tuple(SHARES),
}
"""What decides bits too, and is not in the whole product."""

PLACES: dict[str, Sequence[Any]] = {
    "holding": tuple(HOLDINGS),
    "update": ("all", "shards"),
    "shares": ("equal", "measured"),
    "ranks": (2, 1, 3, 4),
    "algorithm": ("auto", "halving_doubling", "pipelined_tree"),
    "shared_memory": (True, False),
    "pipeline": ("1f1b", "gpipe"),
}
"""What does not: a composition."""

FIRST, THEN = "", "then "

AXES: dict[str, Sequence[Any]] = {
    **WORDS,
    **BESIDE,
    **{FIRST + name: values for name, values in PLACES.items()},
    **{THEN + name: values for name, values in PLACES.items()},
}

FILE = Path(__file__).parent / "matrix.json"
"""The cases, without what stands in where nothing is said."""

STEPS, KILLED_AT = 6, 5
# 8 micro-batches of 4 over 70 samples: steps 3 and 6 end an epoch with one micro-batch of 4, one of
# 2, and six that are empty.
SAMPLES = 70


class Net(nn.Module):
    """Convolutions with BatchNorm, and fully connected layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(2), nn.Conv2d(6, 8, 2), nn.BatchNorm2d(8), nn.ReLU()),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(32, 21), nn.GELU(), nn.Dropout(0.5)),
            *(nn.Linear(21, 13), nn.ReLU(inplace=True), nn.Linear(13, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.features(x).flatten(1))
        return y


class AnySpeed:
    """Stands in for the measurement: a rank's seconds for a micro-batch, anew at each step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, timings: Timings) -> float:
        place = f"{self.seed}, {os.environ.get('RANK')}, {timings.step}"
        return random.Random(place).choice([1.0, 1.0, 2.0, 3.5, 9.0])


def full(case: Case) -> Case:
    return {name: values[0] for name, values in AXES.items()} | dict(case)


def is_cut(case: Case) -> bool:
    """Whether layers are computed in parts, which decides bits, on one worker too."""
    return any(HOLDINGS[case[place + "holding"]].is_split for place in (FIRST, THEN))


def recipe_of(case: Case, place: str) -> Recipe:
    parallel = HOLDINGS[case[place + "holding"]]
    if is_cut(case):
        parallel = dataclasses.replace(parallel, split=HEAD, parts=PARTS)
    parallel = dataclasses.replace(parallel, pipeline=case[place + "pipeline"])
    words = MODES[case["mode"]]
    if case[place + "shares"] == "measured":
        words = {**words, "shares": "measured", "shares_every": 1}
    type_: Any = case["solver"]
    recipe = Recipe(
        train=TrainConfig(
            32,
            4,
            steps=STEPS,
            seed=5,
            device="cpu",
            autocast=case["autocast"],
            ema_decay=case["average"],
            eval_every=3,
            eval_batch_size=8,
        ),
        solver=SolverConfig(
            type_,
            base_lr=0.5 if type_ == "lars" else 0.02,
            momentum=0.9,
            weight_decay=1e-3,
            clip_gradients=case["clip"],
        ),
        exchange=ExchangeConfig(
            bucket_bytes=1500,
            compressor=case["codec"],
            update_at=case[place + "update"],
            algorithm=case[place + "algorithm"],
            shared_memory=case[place + "shared_memory"],
        ),
        synchrony=SynchronyConfig(**words),
        parallel=parallel,
        checkpoint=CheckpointConfig(every=2, keep_last=0),
        prune=PRUNES[case["prune"]],
        share=SHARES[case["share"]],
    )
    for name in BESIDE:
        section, _, word = name.partition(".")
        if word:
            config: Any = dataclasses.replace(getattr(recipe, section), **{word: case[name]})
            recipe = dataclasses.replace(recipe, **{section: config})
    return recipe


def alone(case: Case) -> tuple[Recipe, tuple[Any, ...]]:
    """The recipe of one worker whose bits a case is to end in, and what tells it from others."""
    whole = {place + name: PLACES[name][0] for place in (FIRST, THEN) for name in PLACES}
    recipe = recipe_of({**case, **whole}, FIRST)
    if is_cut(case):
        recipe = dataclasses.replace(recipe, parallel=ParallelConfig(split=HEAD, parts=PARTS))
    return recipe, (is_cut(case), *(case[name] for name in (*WORDS, *BESIDE)))


def is_possible(case: Case) -> bool:
    """Whether nothing in it is refused, what is not named taken as it is by default."""
    case = full(case)
    words = tuple((name, case[name]) for name in (*WORDS, *BESIDE))
    return all(
        _passes(words, is_cut(case), tuple((name, case[place + name]) for name in PLACES))
        for place in (FIRST, THEN)
    )


Values = tuple[tuple[str, Any], ...]


@cache
def _passes(words: Values, cut: bool, composition: Values) -> bool:
    other = {THEN + "holding": "split" if cut else "whole"}
    return not why_not({**dict(words), **dict(composition), **other}, FIRST)


def why_not(case: Case, place: str) -> str:
    recipe, ranks = recipe_of(case, place), case[place + "ranks"]
    if recipe.synchrony.server == "sharded" and ranks == 1:
        return "one rank has all weights, and nothing is in parts"
    try:
        check_ranks(check_recipe(recipe, model=True), ranks, ranks, False)
    except RecipeError as error:
        return str(error)
    return ""


def saved_cases() -> list[Case]:
    return [full(each) for each in json.loads(FILE.read_text("utf-8"))]


def possible_with(case: Case) -> Case | None:
    """The same with what else it takes to be possible: other numbers of ranks, and a split in the
    other composition.
    """
    if is_possible(case):
        return case
    others = [name for name in (FIRST + "ranks", THEN + "ranks") if name not in case]
    for values in product(*(AXES[name] for name in others)):
        if is_possible(found := {**case, **dict(zip(others, values, strict=True))}):
            return found
    return None


PAIRWISE = Pairwise(AXES, is_possible, possible_with, full)


def all_words() -> list[Case]:
    return [dict(zip(WORDS, values, strict=True)) for values in product(*WORDS.values())]


def chain(words: Case, cut: bool) -> list[Case]:
    """Each composition that is possible with these words and some beside them, going on in the
    next. cut: whether layers are computed in parts.
    """
    chance = random.Random(f"{words}")
    words = {**words, **{name: values[0] for name, values in BESIDE.items()}}
    for name, values in BESIDE.items():
        if is_possible(more := {**words, name: chance.choice(values)}):
            words = more
    own = tuple(words.items())
    found = [
        composition
        for values in product(*PLACES.values())
        if _passes(own, cut, composition := tuple(zip(PLACES, values, strict=True)))
    ]
    chance.shuffle(found)
    after = [*found[1:], *found[:1]]
    cases = [
        {**words, **dict(first), **{THEN + name: value for name, value in then}}
        for first, then in zip(found, after, strict=True)
    ]
    return [case for case in cases if is_cut(case) == cut]


def given() -> Parts:
    train, test, validation = small_data(SAMPLES), small_data(30, 1), small_data(20, 2)
    return Parts(Net, train=train, test=test, validation=validation)


def fit(
    recipe: Recipe, folder: Path, seed: int = 0, resume: str | None = None, lost: int = -1
) -> firecaffe.Result | None:
    """Trains. seed: of the speeds by which shares are measured. lost: the rank that is killed on
    the way. None on a rank that goes along with it.
    """
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=str(folder), tensorboard=False))

    def is_due(step: int) -> bool:
        while step + 1 >= KILLED_AT and not any(folder.glob("checkpoints/step-*")):
            time.sleep(0.01)
        return step + 1 >= KILLED_AT

    parts = given()
    with patch.object(every_step, "own_seconds", AnySpeed(seed)), killed(lost, is_due):
        try:
            return firecaffe.train(
                recipe,
                Net,
                parts.train,
                parts.test,
                resume=resume,
                validation_set=parts.validation,
            )
        except PeerLostError:
            if lost < 0:
                raise
            return None


if __name__ == "__main__":
    usual = full({})
    rows = [{name: v for name, v in case.items() if v != usual[name]} for case in PAIRWISE.cover()]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", "utf-8")
