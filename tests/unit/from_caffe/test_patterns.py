"""Patterns say of each parameter what its own word would."""

import random
from fnmatch import fnmatchcase

import pytest

from firecaffe.from_caffe.net_settings import as_patterns, grouped


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
