"""A checkpoint is read and verified by one rank, and is the same on all; tensors of all ranks come
to one a tensor at a time, in nobody's memory all at once.

Saved by any number of ranks and loaded by any other it is in the matrix (`test_matrix.py`).
"""

import os
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn, optim

from firecaffe.cluster.agree import digest
from firecaffe.cluster.world import join
from firecaffe.errors import AgreementError, CheckpointError, NotFiniteError
from firecaffe.files import sha256_of
from firecaffe.training import checkpoint as module
from firecaffe.training import start
from firecaffe.training.checkpoint import Checkpoint, save_checkpoint, sums_digest
from firecaffe.training.start import WORDS, BroadcastTensors, find_start
from firecaffe.training.state import State
from firecaffe.training.tensor_file import InMemory, Stored
from firecaffe.transport.collect import HeldPart, collect, gather_all, list_wholes
from tests.kit.training_steps import state_of
from tests.world import Ranks

TENSORS = {
    "parameter/w": torch.arange(6.0).reshape(2, 3),
    "parameter/half": torch.tensor([0.1, -3.0], dtype=torch.bfloat16),
    "buffer/count": torch.tensor(1 << 40),
    "buffer/none": torch.empty(0, 4),
    "buffer/small": torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn),
    "optimizer/w/is_there": torch.tensor([True, False]),
}
NUMBERS = {"scalars": {"w/step": 3.0, "w/none": None, "w/rate": 0.1}}


def count_reads() -> list[str]:
    """The files that this rank hashes from now on."""
    read: list[str] = []

    def sha256(path: Path) -> str:
        read.append(path.name)
        return sha256_of(path)

    vars(module)["sha256_of"] = sha256
    return read


def resume(where: str) -> tuple[list[str], str, list[object], list[str]]:
    with join("cpu", 60) as world:
        read = count_reads()
        try:
            start = find_start(world, where)
        finally:
            vars(module)["sha256_of"] = sha256_of
        found = start.checkpoint
        assert found is not None
        assert sorted(found.tensors) == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert found.tensors.shape(name) == tuple(tensor.shape)
            assert found.tensors.dtype(name) == tensor.dtype
        words = [getattr(found, word) for word in (*WORDS, "folder", "piece_files")]
        return read, digest(sorted(found.tensors.items())), words, start.notes


def test_one_rank_reads_it_and_all_have_it(ranks: Ranks, tmp_path: Path) -> None:
    aside = tmp_path / "compressor"
    aside.write_bytes(b"of each rank its own")
    for step in (4, 5):
        checkpoint = Checkpoint(step, {"a": 1, "b": "x"}, "probe", "history", InMemory(TENSORS))
        checkpoint.numbers, checkpoint.doubts = NUMBERS, ["one"]
        checkpoint.piece_files = {"compressor": aside} if step == 4 else {}
        save_checkpoint(tmp_path / "checkpoints", checkpoint)
    damaged = tmp_path / "checkpoints/step-00000005/state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    read, weights, words, notes = zip(
        *ranks.shared(3, resume, os.path.relpath(tmp_path)), strict=True
    )
    assert read[0]
    assert read[1:] == (["SHA256SUMS"], ["SHA256SUMS"])  # whether it is there at all
    assert set(weights) == {digest(sorted(TENSORS.items()))}
    assert words[0] == words[1] == words[2]
    assert words[0][0] == 4
    # Other hosts' working directories are others.
    assert all(path.is_absolute() for path in (words[0][-2], *words[0][-1].values()))
    assert "damaged" in notes[0][0]


def read_pieces(where: str, blind: int) -> list[tuple[str, bytes, bool]]:
    """The pieces that this rank has of a checkpoint, and whether by a copy. blind: a rank that sees
    none of its files.
    """
    with join("cpu", 60) as world, patch.object(start, "CHUNK_BYTES", 1000):
        digest = (lambda _: "") if world.rank == blind else sums_digest
        with patch(f"{start.__name__}.sums_digest", digest):
            found = find_start(world, where).checkpoint
        assert found is not None
        files = sorted(found.piece_files.items())
        return [(name, path.read_bytes(), Path(where) in path.parents) for name, path in files]


def test_a_rank_that_does_not_see_the_files_of_pieces_has_copies(
    ranks: Ranks, tmp_path: Path
) -> None:
    pieces = {"compressor": bytes(range(256)) * 10, "empty": b"", "replica": b"x" * 2000}
    checkpoint = Checkpoint(4, {}, "probe", "history", InMemory(TENSORS))
    for name, content in pieces.items():
        (tmp_path / name).write_bytes(content)
        checkpoint.piece_files[name] = tmp_path / name
    (tmp_path / "run").mkdir()
    save_checkpoint(tmp_path / "run" / "checkpoints", checkpoint)
    for rank, read in enumerate(ranks.shared(3, read_pieces, str(tmp_path / "run"), 1)):
        assert read == [(name, pieces[name], rank != 1) for name in sorted(pieces)]


WIDTHS = (5, 7, 3, 4)


def make_network() -> nn.Sequential:
    return nn.Sequential(*map(nn.Linear, WIDTHS, WIDTHS[1:]))


def load_counting(where: str) -> tuple[int, int, str, str]:
    """How many tensors this rank holds at once, at most, beside those that it loads into; how many
    there are in all; the digest of what it has loaded; what is said if ranks ask for others.
    """
    empty, alive, counts = torch.empty, weakref.WeakSet[Tensor](), [0]

    def counted(*size: Any, **words: Any) -> Tensor:
        tensor = empty(*size, **words)
        alive.add(tensor)
        counts[0] = max(counts[0], len(alive))
        return tensor

    model = make_network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join("cpu", 60) as world:
        state = state_of(world, model, optimizer)
        with patch.object(torch, "empty", counted):
            found = find_start(world, where).checkpoint
            assert found is not None
            state.load(found)
        loaded = digest(sorted(state.tensors_held_by_all().items()))
        said = ""
        try:
            # Empty ones: rank 0 has nothing to send any more when the others have left.
            kinds = dict.fromkeys(("a/first", "a/other"), ((0,), torch.float32))
            source = InMemory({"a/first": torch.zeros(0)}) if world.is_first else None
            BroadcastTensors(world, kinds, source)["a/first" if world.is_first else "a/other"]
        except AgreementError as error:
            said = str(error)
    return counts[0], len(found.tensors), loaded, said


def test_no_rank_holds_a_second_tensor_of_it(ranks: Ranks, tmp_path: Path) -> None:
    named = dict(make_network().named_parameters())
    tensors = {f"parameter/{name}": each.detach() for name, each in named.items()}
    kept = {f"optimizer/{name}/momentum_buffer": each.detach() + 1 for name, each in named.items()}
    whole = InMemory({**tensors, **kept})
    save_checkpoint(tmp_path / "checkpoints", Checkpoint(4, {}, "probe", tensors=whole))
    each = ranks.shared(3, load_counting, str(tmp_path))
    assert [of for _, of, *_ in each] == [12] * 3
    # Gloo's thread may let go of what it has sent a moment after it has said so.
    assert max(most for most, *_ in each) <= 2
    assert {loaded for _, _, loaded, _ in each} == {digest(sorted(whole.items()))}
    assert each[0][3] == ""
    assert all("a/first" in said and "a/other" in said for *_, said in each[1:])


def resumed_by(where: str, resuming: list[int]) -> str:
    """What a rank says if these ranks are told to resume from nothing."""
    with join("cpu", 60) as world, pytest.raises((AgreementError, CheckpointError)) as caught:
        find_start(world, where if world.rank in resuming else None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("resuming", "said"), [([0], "rank 0"), ([1], "rank 1"), ([0, 1, 2], "no checkpoint")]
)
def test_a_resume_that_cannot_be_is_refused_on_all_ranks(
    ranks: Ranks, tmp_path: Path, resuming: list[int], said: str
) -> None:
    for answer in ranks.shared(3, resumed_by, str(tmp_path), resuming):
        assert said in answer


def refused() -> list[str]:
    """What is said of a NaN that one rank alone holds; of rows that nobody holds, or two shapes."""
    said = []
    with join("cpu") as world:
        weight = torch.ones(2, 3)
        weight[1, 1] = float("nan") if world.rank == 1 else 1.0
        held = Held({f"{world.rank}/a": HeldPart(weight)})
        try:
            State(world, {"replica": held}).check_finite()
        except NotFiniteError as error:
            said.append(str(error))
        rows = torch.zeros(2, 3 + world.rank)
        for part in (
            HeldPart(rows[:, :3], range(4 * world.rank, 4 * world.rank + 2), 8),
            HeldPart(rows),
        ):
            try:
                list_wholes(world, {"w": part})
            except AgreementError as error:
                said.append(str(error))
        return said


@dataclass(frozen=True)
class Held:
    """Tensors each of which is on one rank."""

    tensors: dict[str, HeldPart]
    held_by_all: bool = False
    is_result: bool = True

    def parts(self) -> dict[str, HeldPart]:
        return self.tensors

    def load(self, stored: Stored) -> None:
        raise NotImplementedError


def test_what_cannot_be_saved_is_refused_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks.shared(2, refused)
    assert first == second
    not_finite, missing, unlike = first
    assert "replica/1/a" in not_finite
    assert all(word in missing for word in ("row 2 of w", "8"))
    assert all(word in unlike for word in ("rank 1", "(2, 3)", "(2, 4)"))


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
        return dict(gather_all(world, {**own, "first": HeldPart(WHOLES["first"], order=2)}))


def test_all_get_all_whole(ranks: Ranks) -> None:
    """Of rows, columns, what all have and what one has; one of the ranks has none of some."""
    for found in ranks.shared(3, given_to_all):
        assert list(found) == list(WHOLES)
        for name, whole in WHOLES.items():
            assert found[name].dtype == whole.dtype
            assert torch.equal(found[name], whole)
