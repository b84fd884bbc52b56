"""Error feedback: what is sent and what is remembered is what came in; and where memory goes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.gradients.compressors import COMPRESSORS, make_compressor
from firecaffe.gradients.compressors.codec import (
    ROW,
    BucketLayout,
    Compressor,
    LowRank,
    RowCodec,
    TensorCodec,
)
from firecaffe.gradients.compressors.feedback import NodeMemory, keep_rest
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
FORGETFUL = pytest.mark.parametrize("name", CASTS)
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


@pytest.mark.parametrize("name", ["int8", "threshold", "top_k"])
@given(values=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=ROW))
def test_sent_and_rest_are_exactly_x(name: str, values: list[float]) -> None:
    codec = COMPRESSORS[name]
    x = torch.zeros(ROW)
    x[: len(values)] = torch.tensor(values)
    memory = torch.zeros(ROW)
    if isinstance(codec, RowCodec):
        sent = codec.decode(codec.encode(x))
    else:
        assert isinstance(codec, TensorCodec)
        sent = codec.decode(codec.encode(x, memory), ROW)
    keep_rest(memory, x, sent)
    assert torch.equal(sent + memory, x)


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
    for index in range(300):
        noisy = {key: steady[key] + 0.5 * gradient(index + 1)[key] for key in SHAPES}
        total = step(compressor, [noisy])
        for key in SHAPES:
            waiting[key] += noisy[key] - total[key]
    for key in SHAPES:
        assert waiting[key].norm() <= 60 * steady[key].norm()


@FORGETFUL
def test_a_cast_remembers_nothing(name: str) -> None:
    compressor = make_compressor(name, LAYOUTS)
    first = step(compressor, [gradient(0)])
    assert compressor.state() == {}
    again = step(compressor, [gradient(0)])
    assert all(torch.equal(first[key], again[key]) for key in SHAPES)
    with pytest.raises(CheckpointError, match=r"compressor memory '0\.w', which"):
        compressor.load_state({"0.w": torch.zeros(480)}, [0])


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


def test_one_infinity_of_each_sign_is_not_nothing() -> None:
    # Their sum is NaN, not 0.
    compressor = make_compressor("top_k", LAYOUTS)
    total = step(
        compressor, [{**gradient(0), "b": torch.full((300,), s * math.inf)} for s in (1, -1)]
    )
    assert total["b"][:4].isnan().all()


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


def flat_layout(*names: str) -> BucketLayout:
    return make_layouts(dict.fromkeys(names, (3,)), [list(names)])[0]


class Reads(dict[str, Tensor]):
    """A state that notes what of it is read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: list[str] = []

    def __getitem__(self, key: str) -> Tensor:
        self.read.append(key)
        return super().__getitem__(key)


def test_a_rank_reads_its_own_nodes_memory_alone() -> None:
    layouts = [flat_layout("a"), flat_layout("b", "c")]
    memory = NodeMemory(layouts, ["a", "b"])
    loaded = Reads(
        {
            f"{node}.{name}": torch.full((3,), 10.0 * node + place)
            for node in range(4)
            for place, name in enumerate("ab", start=1)
        }
    )
    memory.load_state(loaded, [2, 7])
    assert loaded.read == ["2.a", "2.b"]
    assert memory.state().keys() == {"2.a", "2.b"}  # before it was asked for
    zeros = [(2, torch.zeros(512)), (7, torch.zeros(512))]
    two, seven = memory.vectors(1, zeros)
    assert two.tolist() == [22.0] * 3 + [0.0] * 509
    assert not seven.any()
    (a_of_two, _) = memory.vectors(0, [(2, torch.zeros(256)), (7, torch.zeros(256))])
    assert a_of_two.tolist() == [21.0] * 3 + [0.0] * 253
    assert memory.state().keys() == {"2.a", "2.b", "7.a", "7.b"}
    assert memory.vectors(1, zeros)[0] is two
    memory.load_state({}, [2, 7])
    assert memory.state() == {}
    assert not memory.vectors(1, zeros)[0].any()


@pytest.mark.parametrize(
    ("key", "length", "message"),
    [
        ("0.d", 3, "compressor memory '0.d', which this model"),
        ("a", 3, "compressor memory 'a', which this model"),
        ("x.a", 3, "compressor memory 'x.a', which this model"),
        ("12.a", 4, r"memory '12.a' has shape \(4,\); the parameter needs \(3,\)"),
    ],
)
def test_memory_of_another_model_is_refused(key: str, length: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        NodeMemory([flat_layout("a")], ["a"]).load_state({key: torch.zeros(length)}, [0, 12])


def test_an_unknown_compressor_is_named_with_those_there_are() -> None:
    with pytest.raises(RecipeError, match=r"exchange\.compressor is 'zip'; .*one_bit.*power_sgd"):
        make_compressor("zip", LAYOUTS)
