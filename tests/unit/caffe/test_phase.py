"""Which layers take part. The cases with a state were tried in a real Caffe."""

import pytest

from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.phase import layers_of, phase_of
from firecaffe.caffe.text import parse

NET = """
layer { name: "always" }
layer { name: "train" include { phase: TRAIN } }
layer { name: "test" include { phase: 1 not_stage: "z" } }
layer { name: "no test" exclude { phase: TEST } }
layer { name: "either" include { phase: TRAIN stage: "a" } include { phase: TEST min_level: 2 } }
layer { name: "both" include { stage: "a" stage: "b" } }
layer { name: "low" include { max_level: 0 } }
layer { name: "high" exclude { max_level: 1 } }
layer { name: "any" include { } }
layer { name: "never" exclude { } }
layer { name: "runs" phase: TEST }
"""


@pytest.mark.parametrize(
    ("phase", "stages", "level", "names"),
    [
        ("TRAIN", [], 0, ["train", "no test", "low"]),
        ("TEST", [], 0, ["test", "low"]),
        ("TRAIN", ["a"], 1, ["train", "no test", "either"]),
        ("TEST", ["z", "b"], 2, ["either", "high"]),
        ("TEST", ["a", "b"], -1, ["test", "both", "low"]),
    ],
)
def test_rules(phase: str, stages: list[str], level: int, names: list[str]) -> None:
    found = [each.text("name") for each in layers_of(parse(NET), phase, stages, level)]
    assert found == [
        each.text("name")
        for each in parse(NET).messages("layer")
        if each.text("name") in ("always", "any", "runs", *names)
    ]


def test_a_nets_own_state_counts() -> None:
    net = parse(NET + 'state { phase: TRAIN stage: "a" level: 2 }')
    found = [each.text("name") for each in layers_of(net, "TEST", ["b"])]
    assert found == ["always", "test", "either", "both", "high", "any", "runs"]


def test_a_layers_own_phase_says_how_it_runs() -> None:
    layers = layers_of(parse("layer { phase: TEST } layer { } layer { phase: 0 }"), "TRAIN")
    assert [phase_of(each, "TRAIN") for each in layers] == ["TEST", "TRAIN", "TRAIN"]


def test_all_of_a_rule_is_read_and_nothing_else() -> None:
    net = parse(NET + 'layer { include { phase: TRAIN min_level: 3 stage: "x" other: 1 } }')
    for phase in ("TRAIN", "TEST"):
        for layer in layers_of(net, phase):
            layer.ignore("name", "phase")
    unread = [name for name, _ in net.unread()]
    assert [name for name in unread if "name" not in name] == ["layer.include.other"]


def test_include_beside_exclude_is_refused() -> None:
    with pytest.raises(CaffeError, match=":2: both include and exclude"):
        layers_of(parse("\nlayer { include { phase: TEST } exclude { phase: TRAIN } }"), "TEST")
