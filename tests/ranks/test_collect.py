"""Tensors of all ranks on their way to rank 0: one at a time, in nobody's memory all at once."""

import re
from pathlib import Path

import torch

from firecaffe.cluster.world import join
from firecaffe.transport.collect import HeldPart, collect, give_all, list_wholes
from tests.world import Ranks

ELEMENTS = 2_000_000
BYTES = 4 * ELEMENTS
EACH = 6
"""Tensors of a rank."""


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def give(rank: int) -> dict[str, HeldPart]:
    own = {f"{rank}.{n}": torch.full((ELEMENTS,), float(10 * rank + n)) for n in range(EACH)}
    alike = torch.ones(3, dtype=torch.bfloat16)
    return {name: HeldPart(each) for name, each in {**own, "alike": alike}.items()}


def gathered() -> tuple[list[tuple[str, int]], list[float], int]:
    """The list, the first element of each tensor that came, and the growth of memory's peak."""
    with join("cpu") as world:
        own = give(world.rank)
        listed = list_wholes(world, own)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = peak_bytes()
        came = []
        for each, (name, tensor) in zip(listed, collect(world, listed, own), strict=False):
            assert (each.name, each.shape, each.dtype) == (name, tensor.shape, tensor.dtype)
            assert tensor.min() == tensor.max()  # without a copy, which would count
            came.append(float(tensor[0]))
        return [(each.name, each.holders[0][0]) for each in listed], came, peak_bytes() - before


def test_rank_0_sees_all_and_holds_one(ranks: Ranks) -> None:
    (listed, came, _), *others = results = ranks.run(3, gathered)
    names = [(f"{rank}.{n}", rank) for rank in range(3) for n in range(EACH)]
    assert sorted(listed) == sorted([*names, ("alike", 0)])
    first = {f"{r}.{n}": 10.0 * r + n for r in range(3) for n in range(EACH)} | {"alike": 1.0}
    assert came == [first[name] for name, _ in listed]
    assert all((each, of_rank) == (listed, []) for each, of_rank, _ in others)
    # All of the others' would be twelve of them, all that there are eighteen. It is two, and up to
    # three more that the heap has freed and not used again.
    assert all(grown < 8 * BYTES for _, _, grown in results)


WHOLES = {
    "rows": torch.arange(15, dtype=torch.float64).view(5, 3),
    "columns": torch.arange(10).view(2, 5) % 3 == 0,
    "first": torch.tensor(2.5, dtype=torch.bfloat16),
    "last": torch.arange(4, dtype=torch.int32),
}
CUT = (0, 2, 2, 5)


def given_to_all() -> dict[str, torch.Tensor]:
    with join("cpu") as world:
        rows = range(*CUT[world.rank : world.rank + 2])
        own = {"last": HeldPart(WHOLES["last"], order=3)} if world.rank == 2 else {}
        if rows:
            own["rows"] = HeldPart(WHOLES["rows"][rows.start : rows.stop], rows, 5, 0)
            columns = WHOLES["columns"][:, rows.start : rows.stop]
            own["columns"] = HeldPart(columns, rows, 5, 1, dim=1)
        return dict(give_all(world, {**own, "first": HeldPart(WHOLES["first"], order=2)}))


def test_all_get_all_whole(ranks: Ranks) -> None:
    """Of rows, columns, what all have and what one has; one of the ranks has none of some."""
    for found in ranks.shared(3, given_to_all):
        assert list(found) == list(WHOLES)
        for name, whole in WHOLES.items():
            assert found[name].dtype == whole.dtype
            assert torch.equal(found[name], whole)
