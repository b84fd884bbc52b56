"""Error feedback: what is sent and what is remembered is what came in; and where memory goes."""

import math

import pytest
import torch
from torch import Tensor

from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.gradients.compressors import COMPRESSORS, make_compressor
from firecaffe.gradients.compressors.codec import BucketLayout, Compressor, LowRank
from firecaffe.gradients.compressors.feedback import NodeMemory
from tests.unit.gradients.compressors.local_wire import LocalWire, flatten, make_layouts, unflatten

SHAPES: dict[str, tuple[int, ...]] = {
    "w": (24, 20),
    "one": (1,),
    "b": (300,),
    "scalar": (),
    "empty": (0, 4),
}
LAYOUTS = make_layouts(SHAPES, [["empty", "w", "one"], ["scalar", "b"]])
ONE_BUCKET = make_layouts(SHAPES, [["b", "w", "scalar", "empty", "one"]])
CASTS = ("float16", "bfloat16")
REMEMBERING = pytest.mark.parametrize("name", [name for name in COMPRESSORS if name not in CASTS])
EVERY = pytest.mark.parametrize("name", COMPRESSORS)


def step(
    compressor: Compressor, nodes: list[dict[str, Tensor]], layouts: list[BucketLayout] = LAYOUTS
) -> dict[str, Tensor]:
    """The totals of one step on one rank, by parameter."""
    totals: dict[str, Tensor] = {}
    for bucket, layout in enumerate(layouts):
        vectors = [(index, flatten(layout, node)) for index, node in enumerate(nodes)]
        total = compressor.reduce(bucket, vectors, LocalWire(len(nodes)))
        totals.update(unflatten(layout, total))
    return totals


def gradient(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(math.prod(shape), generator=generator)
        for name, shape in SHAPES.items()
    }


@REMEMBERING
def test_all_that_was_sent_and_the_last_memory_are_all_gradients(name: str) -> None:
    compressor = make_compressor(name, LAYOUTS)
    sent, came_in = gradient(0, scale=0.0), gradient(0, scale=0.0)
    for seed in range(12):
        total = step(compressor, [gradient(seed)])
        for key in SHAPES:
            sent[key] += total[key]
            came_in[key] += gradient(seed)[key]
    memory = compressor.state()
    for key in SHAPES:
        rest = memory.get(f"0.{key}", torch.zeros(()))
        assert torch.allclose(sent[key] + rest, came_in[key], rtol=0, atol=2e-5)


@REMEMBERING
def test_what_waits_is_less_than_the_gradients_of_sixty_steps(name: str) -> None:
    """After any number of steps: sums of what was sent come to the sums of gradients."""
    compressor = make_compressor(name, LAYOUTS)
    steady = gradient(0)
    waiting = gradient(0, scale=0.0)
    for index in range(150):
        noisy = {key: steady[key] + 0.5 * gradient(index + 1)[key] for key in SHAPES}
        total = step(compressor, [noisy])
        for key in SHAPES:
            waiting[key] += noisy[key] - total[key]
    for key in SHAPES:
        assert waiting[key].norm() <= 60 * steady[key].norm()


@EVERY
def test_zeros_stay_zeros(name: str) -> None:
    compressor = make_compressor(name, LAYOUTS)
    for _ in range(2):
        total = step(compressor, [gradient(0, scale=0.0)] * 3)
        assert not any(value.any() for value in total.values())
    memories = [m for key, m in compressor.state().items() if not key.startswith("q.")]
    assert not any(memory.any() for memory in memories)


@EVERY
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_in_the_total_once(name: str, number: float) -> None:
    compressor = make_compressor(name, LAYOUTS)
    step(compressor, [gradient(0), gradient(1)])
    broken = gradient(2)
    broken["b"][299] = broken["one"][0] = number
    total = step(compressor, [gradient(3), broken])
    assert not total["b"][299].isfinite()
    assert not total["one"].isfinite()
    assert total["w"].isfinite().all()
    assert all(memory.isfinite().all() for memory in compressor.state().values())
    total = step(compressor, [gradient(4), gradient(5)])
    assert all(value.isfinite().all() for value in total.values())
    opposed = [{**gradient(0), "one": torch.full((1,), sign * number)} for sign in (1, -1)]
    assert step(compressor, opposed)["one"].isnan()  # the sum of infinities is NaN, not 0


@REMEMBERING
def test_a_state_is_by_node_and_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPRESSORS, "power_sgd", LowRank(4))  # matrices here are small
    compressor = make_compressor(name, LAYOUTS)
    step(compressor, [gradient(0), gradient(1), gradient(2)])
    state = compressor.state()
    compressed = ["w"] if name == "power_sgd" else list(SHAPES)
    keys = {f"{node}.{key}" for node in range(3) for key in compressed}
    assert {key for key in state if not key.startswith("q.")} == keys
    memories = {key: value for key, value in state.items() if not key.startswith("q.")}
    before = {key: value.clone() for key, value in memories.items()}
    step(compressor, [gradient(3), gradient(4), gradient(5)])
    # No copy, which might be many times the weights: it goes on with the training.
    assert not all(torch.equal(memories[key], before[key]) for key in memories)


@EVERY
def test_other_buckets_go_on_with_a_state_to_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any number of ranks it is tests/ranks/test_compressors.py that says so."""
    monkeypatch.setitem(COMPRESSORS, "power_sgd", LowRank(4))
    before, after = make_compressor(name, LAYOUTS), make_compressor(name, ONE_BUCKET)
    step(before, [gradient(seed) for seed in range(3)])
    after.load_state({key: value.clone() for key, value in before.state().items()}, range(3))
    later = [gradient(seed) for seed in range(3, 6)]
    expected, found = step(before, later), step(after, later, ONE_BUCKET)
    assert all(torch.equal(found[key], expected[key]) for key in SHAPES)
    forgetful = step(make_compressor(name, LAYOUTS), later)
    assert all(torch.equal(forgetful[key], expected[key]) for key in SHAPES) == (name in CASTS)
    assert (before.state() == {}) == (name in CASTS)


def flat_layout(*names: str) -> BucketLayout:
    return make_layouts(dict.fromkeys(names, (3,)), [list(names)])[0]


def test_a_rank_has_its_own_nodes_memory_alone() -> None:
    memory = NodeMemory([flat_layout("a"), flat_layout("b", "c")], ["a", "b"])
    keys = [f"{node}.{name}" for node in range(4) for name in "ab"]
    memory.load_state({key: torch.full((3,), float(n)) for n, key in enumerate(keys)}, [2, 7])
    assert memory.state().keys() == {"2.a", "2.b"}  # before it was asked for
    zeros = [(2, torch.zeros(512)), (7, torch.zeros(512))]
    two, seven = memory.vectors(1, zeros)
    assert two.tolist() == [5.0] * 3 + [0.0] * 509  # of 2.b
    assert not seven.any()
    assert memory.vectors(1, zeros)[0] is two
    memory.load_state({}, [2, 7])
    assert memory.state() == {}
    assert not memory.vectors(1, zeros)[0].any()


def test_memory_of_another_model_is_refused() -> None:
    memory = NodeMemory([flat_layout("a")], ["a"])
    for key in ("0.d", "a", "x.a"):
        with pytest.raises(CheckpointError, match=f"'{key}', which this model"):
            memory.load_state({key: torch.zeros(3)}, [0, 12])
    with pytest.raises(CheckpointError, match=r"'12.a' has shape \(4,\); .* needs \(3,\)"):
        memory.load_state({"12.a": torch.zeros(4)}, [0, 12])
    for name in CASTS:
        with pytest.raises(CheckpointError, match=r"compressor memory '0\.w', which"):
            make_compressor(name, LAYOUTS).load_state({"0.w": torch.zeros(480)}, [0])


def test_an_unknown_compressor_is_named_with_those_there_are() -> None:
    with pytest.raises(RecipeError, match=r"exchange\.compressor is 'zip'; .*one_bit.*power_sgd"):
        make_compressor("zip", LAYOUTS)
