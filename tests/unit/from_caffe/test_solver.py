"""A solver's words as a recipe's, patterns of multipliers, and what is refused."""

import random
from fnmatch import fnmatchcase
from typing import Any

import pytest

from firecaffe.caffe import text
from firecaffe.caffe.message import CaffeError
from firecaffe.from_caffe import Report
from firecaffe.from_caffe.net_settings import as_patterns, grouped
from firecaffe.from_caffe.solver import (
    TYPES,
    SolverStages,
    TrainSettings,
    read_training,
    read_update,
)
from firecaffe.recipe.checked_recipe import check_recipe, recipe_from

BASE = 'base_lr: 0.1 lr_policy: "fixed"\n'


def update(words: str, iter_size: int = 1) -> tuple[dict[str, Any], Report]:
    report = Report()
    found = read_update(text.parse(BASE + words, "s.prototxt"), iter_size, report)
    check_recipe(recipe_from({"solver": found}))
    return found, report


def training(words: str) -> tuple[TrainSettings, Report]:
    report = Report()
    return read_training(text.parse("max_iter: 9\n" + words, "s.prototxt"), report), report


FIXED = {"base_lr": 0.1, "lr_policy": "fixed"}


CAFFE = {"momentum_form": "caffe"}
ADAM = {"momentum": 0.9, "momentum2": 0.999, "delta": 1e-8}
TYPES_READ: dict[str, dict[str, Any]] = {
    "": {"type": "sgd", "momentum": 0.0, **CAFFE},
    "momentum: 0.9": {"type": "sgd", "momentum": 0.9, **CAFFE},
    'type: "Nesterov" momentum: 0.9': {"type": "nesterov", "momentum": 0.9, **CAFFE},
    "solver_type: NESTEROV": {"type": "sgd", "momentum": 0.0, **CAFFE},
    "solver_type: 2 delta: 0.5": {"type": "adagrad", "delta": 0.5},
    'type: "RMSProp"': {"type": "rmsprop", "rms_decay": 0.99, "delta": 1e-8},
    'type: "AdaDelta" momentum: 0.9 delta: 1': {"type": "adadelta", "momentum": 0.9, "delta": 1.0},
    'type: "Adam" momentum: 0.9': {"type": "adam", **ADAM, **CAFFE},
}


@pytest.mark.parametrize("words", TYPES_READ)
def test_types_with_caffes_defaults(words: str) -> None:
    assert update(words)[0] == {**TYPES_READ[words], **FIXED}


def test_the_old_enum_names_every_type() -> None:
    for number, kind in enumerate(TYPES):
        momentum = "" if kind in ("AdaGrad", "RMSProp") else "momentum: 0.9"
        old, _ = update(f"solver_type: {number} {momentum}")
        assert old == update(f'type: "{kind}" {momentum}')[0]
        assert old["type"] == kind.lower()


POLICIES: list[tuple[str, str, dict[str, Any]]] = [
    ("step", "gamma: 0.5 stepsize: 10", {"gamma": 0.5, "stepsize": 10}),
    ("exp", "gamma: 0.99", {"gamma": 0.99}),
    ("inv", "gamma: 1e-4 power: 0.75", {"gamma": 1e-4, "power": 0.75}),
    ("multistep", "gamma: 1 stepvalue: 5 stepvalue: 7", {"gamma": 1.0, "stepvalue": [5, 7]}),
    ("poly", "", {"power": 0.0}),
    ("sigmoid", "gamma: -5 stepsize: 3", {"gamma": -5.0, "stepsize": 3}),
]


@pytest.mark.parametrize(("policy", "words", "expected"), POLICIES)
def test_policies(policy: str, words: str, expected: dict[str, Any]) -> None:
    solver, _ = update(f'{words} lr_policy: "{policy}"')
    given = {"type": "sgd", "momentum": 0.0, "base_lr": 0.1, **CAFFE}
    assert solver == {**given, "lr_policy": policy, **expected}


def test_multistep_without_steps_is_fixed() -> None:
    solver, report = update('lr_policy: "multistep" gamma: 0.1')
    assert solver["lr_policy"] == "fixed"
    assert "gamma" not in solver
    assert len(report.changed) == 1


def test_decay_and_clip() -> None:
    found, _ = update('weight_decay: 0.01 regularization_type: "L1" clip_gradients: 10', 4)
    words = {"weight_decay": 0.01, "decay_form": "l1", "clip_gradients": 2.5}
    assert found.items() >= words.items()
    found, _ = update("weight_decay: 0.01 clip_gradients: -1")
    assert found.keys() & {"decay_form", "clip_gradients"} == set()


def test_words_without_effect_are_not_written_down_but_told() -> None:
    found, report = update("stepsize: 100 gamma: 0.5 rms_decay: 0.9")
    assert found.keys().isdisjoint({"stepsize", "gamma", "rms_decay"})
    told = [note.what for note in report.understood]
    for name in ("stepsize", "gamma", "rms_decay"):
        assert any(what.startswith(f"{name} has no effect") for what in told)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('type: "Adamax"', r's\.prototxt:2: type is "Adamax"; expected one of SGD, Nesterov'),
        ('type: "SGD"\nsolver_type: SGD', r":3: both type and solver_type"),
        ('type: "AdaGrad"\nmomentum: 0.9', r":3: momentum is 0\.9 with type AdaGrad"),
        ('lr_policy: "plateau"', r':2: lr_policy is "plateau"; expected one of fixed, step'),
        ("\n\nclip_gradients: 0", r":4: clip_gradients is 0"),
        ('regularization_type: "L3"', r":2: regularization_type is .L3.; expected L2 or L1"),
        ("base_lr: none", r":2: base_lr is none; expected a finite number"),
    ],
)
def test_refused(words: str, said: str) -> None:
    with pytest.raises(CaffeError, match=said):
        update(words)


def test_a_solver_without_a_rate_is_refused() -> None:
    for words, part in (('lr_policy: "fixed"', "no base_lr"), ("base_lr: 1", "no lr_policy")):
        with pytest.raises(CaffeError, match=part):
            read_update(text.parse(words, "s.prototxt"), 1, Report())


def test_the_training_around() -> None:
    around, report = training(
        "iter_size: 2 test_iter: 100 test_interval: 500 test_initialization: false "
        "snapshot: 50 random_seed: 7 solver_mode: CPU display: 20"
    )
    assert (around.iter_size, around.test_iter) == (2, (100,))
    assert around.words == {
        "train": {"steps": 9, "seed": 7, "device": "cpu", "eval_every": 500},
        "checkpoint": {"every": 50, "keep_last": 0},
    }
    assert not report.left_out
    assert "eval_every" not in training("test_interval: 500")[0].words["train"]


def test_what_is_otherwise_left_out_or_needed_is_told() -> None:
    _, report = training(
        "random_seed: -1 snapshot_diff: true debug_info: true snapshot_format: HDF5\n"
        'snapshot_prefix: "x" snapshot_after_train: false device_id: 1'
    )
    assert [note.place for note in report.left_out] == ["s.prototxt:2"]
    assert len(report.changed) == 6
    around, report = training("max_iter: 0")
    assert around.words["train"] == {}
    assert [note.place for note in report.needed] == ["s.prototxt:2"]


@pytest.mark.parametrize(
    "line",
    [
        *("iter_size: 0", "max_iter: -3", "snapshot: -1"),
        *("test_iter: 10", "random_seed: 9223372036854775808"),
    ],
)
def test_refused_around(line: str) -> None:
    name, _, value = line.partition(": ")
    with pytest.raises(CaffeError, match=rf"s\.prototxt:2: {name} is (given|{value})"):
        training(line)


def test_stages() -> None:
    found, _ = training('train_state { stage: "a" level: 1 } test_state { stage: "b" stage: "c" }')
    assert found.states == {"TRAIN": SolverStages(("a",), 1), "TEST": SolverStages(("b", "c"))}


def value_of(patterns: dict[str, float], name: str) -> float:
    return [1.0, *(value for each, value in patterns.items() if fnmatchcase(name, each))][-1]


def names_of(*layers: str) -> list[str]:
    return [f"{layer}.{blob}" for layer in layers for blob in ("weight", "bias")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 1, 2, 1, 2], {"*.bias": 2.0}),
        ([1, 1, 1, 1, 1, 1], {}),
        ([10, 10, 10, 10, 10, 10], {"*": 10.0}),
        ([1, 2, 1, 2, 10, 20], {"*.bias": 2.0, "fc.weight": 10.0, "fc.bias": 20.0}),
        ([1, 1, 1, 1, 10, 10], {"fc.*": 10.0}),
        ([1, 0, 1, 0, 1, 0], {"*.bias": 0.0}),
    ],
)
def test_patterns_are_short(values: list[float], expected: dict[str, float]) -> None:
    names = names_of("conv1", "conv2", "fc")
    assert as_patterns(dict(zip(names, values, strict=True))) == expected


def test_patterns_say_what_every_name_would() -> None:
    draw = random.Random(3)
    layers = ["conv", "conv1", "conv1.2", "a[b]", "a*", "c?", "conv1/7x7", "scale"]
    for _ in range(300):
        names = names_of(*draw.sample(layers, draw.randint(1, len(layers))))
        names.remove(draw.choice(names))
        values = {name: draw.choice([0.0, 1.0, 2.0, 10.0]) for name in names}
        patterns = as_patterns(values)
        assert {name: value_of(patterns, name) for name in values} == values, patterns
        chosen = [name for name, value in values.items() if value == 0.0]
        found = grouped(chosen, names)
        hit = [name for name in names if any(fnmatchcase(name, each) for each in found)]
        assert hit == chosen, found
        for each in patterns:
            assert any(fnmatchcase(name, each) for name in names), each
