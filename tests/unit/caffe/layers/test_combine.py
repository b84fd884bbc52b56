"""Eltwise, Concat, Slice and Split."""

import pytest
import torch

from firecaffe.caffe import text
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.net import Net
from tests.golden.caffe.cases import inputs, layer
from tests.unit.caffe.layers.alone import net_of, random

SHAPE = (2, 6, 3, 4)


class TestEltwise:
    def test_operations(self) -> None:
        a, b, c = (random(*SHAPE) + shift for shift in (0.0, 0.3, -0.2))
        for words, expected in (
            ("operation: PROD", a * b * c),
            ("", a + b + c),
            ("operation: SUM coeff: 1 coeff: -2 coeff: 0.5", a - 2 * b + 0.5 * c),
            ("operation: MAX", torch.stack([a, b, c]).amax(0)),
        ):
            net = net_of("Eltwise", f"eltwise_param {{ {words} }}", SHAPE, SHAPE, SHAPE)
            torch.testing.assert_close(net(a, b, c)["y0"], expected)

    def test_of_equal_ones_the_second_has_the_gradient(self) -> None:
        values = [torch.ones(1, 2).requires_grad_() for _ in range(3)]
        net = net_of("Eltwise", "eltwise_param { operation: MAX }", (1, 2), (1, 2), (1, 2))
        net(*values)["y0"].sum().backward()
        assert [each.grad.tolist() for each in values if each.grad is not None] == [
            [[0, 0]],
            [[1, 1]],
            [[0, 0]],
        ]

    @pytest.mark.parametrize("operation", ["PROD", "SUM", "MAX"])
    def test_in_place_is_as_with_a_top_of_its_own(self, operation: str) -> None:
        """In a real Caffe it is not: of PROD the gradients, of SUM and MAX the values are wrong."""
        found = []
        for top in ("a", "c"):
            net = Net(
                text.parse(
                    inputs(x=(2, 4), z=(2, 4))
                    + layer("Power", "x", "a")
                    + layer("Power", "z", "b")
                    + layer("Eltwise", "a b", top, f"eltwise_param {{ operation: {operation} }}")
                )
            )
            torch.manual_seed(3)
            values = [torch.randn(2, 4).requires_grad_() for _ in range(2)]
            y = net(*values)[top]
            found.append([y, *torch.autograd.grad(y.square().sum(), values)])
        for own, other in zip(*found, strict=True):
            assert torch.equal(own, other)

    @pytest.mark.parametrize(
        ("words", "shapes", "said"),
        [
            ("", (SHAPE,), "two or more"),
            ("", (SHAPE, (2, 6)), "of the same shape"),
            ("coeff: 1", (SHAPE, SHAPE), "1 coeff for 2 bottoms"),
            ("operation: PROD coeff: 1 coeff: 2", (SHAPE, SHAPE), "for SUM"),
        ],
    )
    def test_refused(self, words: str, shapes: tuple[tuple[int, ...], ...], said: str) -> None:
        with pytest.raises(CaffeError, match=said):
            net_of("Eltwise", f"eltwise_param {{ {words} }}", *shapes)


class TestConcat:
    @pytest.mark.parametrize(("words", "axis"), [("", 1), ("axis: -1", 3), ("concat_dim: 0", 0)])
    def test_axis(self, words: str, axis: int) -> None:
        longer = tuple(size + (place == axis) for place, size in enumerate(SHAPE))
        net = net_of("Concat", f"concat_param {{ {words} }}", SHAPE, longer)
        a, b = random(*SHAPE), random(*longer)
        assert torch.equal(net(a, b)["y0"], torch.cat([a, b], axis))

    def test_refused(self) -> None:
        with pytest.raises(CaffeError, match="differ along axis 1 alone"):
            net_of("Concat", "", SHAPE, (2, 6, 3, 5))


class TestSlice:
    @pytest.mark.parametrize(
        ("words", "axis", "sizes"),
        [
            ("", 1, [2, 2, 2]),
            ("slice_point: 1 slice_point: 5", 1, [1, 4, 1]),
            ("axis: -1 slice_point: 1 slice_point: 2", 3, [1, 1, 2]),
            ("slice_dim: 2", 2, [1, 1, 1]),
        ],
    )
    def test_parts(self, words: str, axis: int, sizes: list[int]) -> None:
        net = net_of("Slice", f"slice_param {{ {words} }}", SHAPE, tops=3)
        x = random(*SHAPE)
        for found, expected in zip(net(x).values(), torch.split(x, sizes, axis), strict=True):
            assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        "words", ["axis: 3", "slice_point: 2", "slice_point: 4 slice_point: 2"]
    )
    def test_refused(self, words: str) -> None:
        with pytest.raises(CaffeError, match="Slice 'l' cuts"):
            net_of("Slice", f"slice_param {{ {words} }}", SHAPE, tops=3)


def test_split_adds_the_gradients() -> None:
    x = random(2, 3).requires_grad_()
    first, second = net_of("Split", "", (2, 3), tops=2)(x).values()
    (gradient,) = torch.autograd.grad((first + 2 * second).sum(), x)
    assert (gradient == 3).all()
