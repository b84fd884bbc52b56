"""LSTM and RNN beside what the records of a real Caffe hold: states, blobs, refusals."""

import pytest
import torch

from firecaffe.caffe.layers import LAYERS
from tests.unit.caffe.layers.made import layer, module_of, on_meta, refusal, run

WORDS = 'num_output: 3 weight_filler { type: "constant" value: 0.5 } bias_filler { value: 0.25 }'
PLAIN = f"recurrent_param {{ {WORDS} }}"
EXPOSED = f"recurrent_param {{ {WORDS} expose_hidden: true }}"
STATES = {"LSTM": 2, "RNN": 1}

each_kind = pytest.mark.parametrize("kind", STATES)


@each_kind
def test_blobs_are_filled_and_stand_in_the_order_of_caffe(kind: str) -> None:
    module = module_of(layer(kind, PLAIN), (4, 2, 5), (4, 2), (2, 6))
    found = dict(module.named_parameters())
    assert tuple(found) == LAYERS[kind].blobs
    rows = {"LSTM": 12, "RNN": 3}[kind]
    shapes = [(rows, 5), (rows,), (rows, 6), (rows, 3), (3, 3), (3,)]
    assert [tuple(each.shape) for each in found.values()] == shapes[: len(found)]
    for name, each in found.items():
        assert (each == (0.25 if name.endswith("bias") else 0.5)).all(), name


@each_kind
def test_exposed_states_go_on_and_nothing_goes_back_through_them(kind: str) -> None:
    """Each batch starts from a state of 0 else, whatever `cont` says of its first step."""
    count = STATES[kind]
    shapes = [(4, 2, 5), (4, 2), *[(1, 2, 3)] * count]
    text = layer(kind, EXPOSED, tops=1 + count)
    values, cont = torch.randn(4, 2, 5), torch.ones(4, 2)
    states = [torch.zeros(1, 2, 3, requires_grad=True) for _ in range(count)]
    whole = run(module_of(text, *shapes), values, cont, *states)
    plain = module_of(layer(kind, PLAIN), *shapes[:2])
    for _ in range(2):
        torch.testing.assert_close(plain(values, cont), whole[0])
    half = module_of(text, (2, 2, 5), (2, 2), *shapes[2:])
    first = run(half, values[:2], cont[:2], *states)
    second = run(half, values[2:], cont[2:], *first[1:])
    torch.testing.assert_close(torch.cat([first[0], second[0]]), whole[0])
    for one, other in zip(second[1:], whole[1:], strict=True):
        torch.testing.assert_close(one, other)
        assert not one.requires_grad
    torch.autograd.backward(whole[0].sum())
    assert all(state.grad is None for state in states)
    assert on_meta(text, *shapes) == [(4, 2, 3), *[(1, 2, 3)] * count]


@each_kind
def test_what_cannot_be_is_one_line(kind: str) -> None:
    values, cont, count = (4, 2, 5), (4, 2), STATES[kind]
    too_wide = [(1, 2, 3)] * (count - 1) + [(1, 2, 4)]
    for words, tops, shapes, part in (
        (PLAIN, 1, [values], "1 bottoms"),
        (PLAIN, 2, [values, cont], "2 tops"),
        (PLAIN, 1, [values, (4, 3)], "(steps, streams)"),
        (PLAIN, 1, [values, cont, (3, 6)], "3 streams"),
        (EXPOSED, 1 + count, [values, cont, *too_wide], "starts from"),
        (EXPOSED, 1 + count, [values, cont], "2 bottoms"),
        ("recurrent_param { }", 1, [values, cont], "no num_output"),
    ):
        line = refusal(layer(kind, words, tops), *shapes)
        assert part in line, line
