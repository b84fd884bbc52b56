"""State that ranks hold in different ways, saved whole by any number of them, loaded by any other.

The pieces are toys, one for each way that a training may hold its tensors.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from firecaffe.cluster.world import World, join
from firecaffe.errors import AgreementError, NotFiniteError
from firecaffe.training.checkpoint import Checkpoint, load_newest
from firecaffe.training.piece import Piece, Weights, load_parts
from firecaffe.training.saver import Saver
from firecaffe.training.start import find_start
from firecaffe.training.state import State
from firecaffe.training.tensor_file import Stored, TensorFile
from firecaffe.transport.collect import HeldPart, list_wholes
from tests.world import Ranks

ROWS, REPLICAS = 10, 5
LAYERS = {"a": torch.arange(3.0 * ROWS).view(ROWS, 3), "b": torch.arange(ROWS).double() / 7}
WHOLE = {
    **{f"parameter/{name}": tensor for name, tensor in LAYERS.items()},
    "buffer/count": torch.tensor(3),
    "server/a": -LAYERS["a"],
    **{f"replica/{n}/a": LAYERS["a"] + n for n in range(REPLICAS)},
    "average/a": LAYERS["a"] / 2,
}
"""All tensors, by the names that they have in the digests; a piece of no known name is the last."""


class Split:
    """Layers whose rows are shared out among ranks, the first ranks having one more."""

    is_result = True

    def __init__(self, world: World, whole: dict[str, Tensor]) -> None:
        self.held_by_all = world.world_size == 1
        each, more = divmod(ROWS, world.world_size)
        start = world.rank * each + min(world.rank, more)
        stop = start + each + (world.rank < more)
        self._rows = range(start, stop)
        self._own = {name: tensor[start:stop].clone() for name, tensor in whole.items()}

    def parts(self) -> dict[str, HeldPart]:
        rows = None if self.held_by_all else self._rows
        return {name: HeldPart(tensor, rows, ROWS) for name, tensor in self._own.items()}

    def load(self, stored: Stored) -> None:
        load_parts(self.parts(), stored)


class Some:
    """Tensors each of which is on one rank: replicas, or what a server holds."""

    held_by_all = False
    is_result = True

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """tensors: this rank's."""
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def parts(self) -> dict[str, HeldPart]:
        return {
            name: HeldPart(tensor, order=int(name[0]) if name[0].isdecimal() else 0)
            for name, tensor in self.tensors.items()
        }

    def load(self, stored: Stored) -> None:
        for name in self.tensors:
            self.tensors[name].copy_(stored[name])


def under(name: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{name}/"): tensor
        for key, tensor in WHOLE.items()
        if key.startswith(f"{name}/")
    }


def state_on(world: World, factor: float) -> State:
    """All pieces; their tensors are WHOLE's times a factor."""
    wholes = {
        piece: {name: tensor * int(factor) for name, tensor in under(piece).items()}
        for piece in ("parameter", "buffer", "average", "replica", "server")
    }
    is_server = world.rank == world.world_size - 1
    pieces: dict[str, Piece] = {
        "parameter": Split(world, wholes["parameter"]),
        "buffer": Weights(wholes["buffer"].items),
        "average": Weights(wholes["average"].items),
        "replica": Some(
            {
                name: tensor
                for name, tensor in wholes["replica"].items()
                if int(name[0]) % world.world_size == world.rank
            }
        ),
        "server": Some(wholes["server"] if is_server else {}),
    }
    return State(world, pieces)


def save_and_load(folder: Path, source: Path | None) -> dict[str, Any]:
    """What this rank finds where it begins from nothing, or from a checkpoint, and saves that."""
    received, read = [0], [0]
    recv, read_file = dist.recv, TensorFile._read

    def counted_recv(tensor: Tensor, *words: Any, **named: Any) -> Any:
        received[0] += tensor.nbytes
        return recv(tensor, *words, **named)

    def counted_read(file: TensorFile, *words: Any) -> Tensor:
        tensor = read_file(file, *words)
        read[0] += tensor.nbytes
        return tensor

    with (
        join("cpu") as world,
        patch.object(dist, "recv", counted_recv),
        patch.object(TensorFile, "_read", counted_read),
    ):
        state = state_on(world, 1 if source is None else 0)
        if source is not None:
            state.load(load_newest(source)[0])
            state.check_all_was_loaded()
            assert state.losses.history == "told"
        has_read = read[0]
        parts = [part for piece in state.pieces.values() for part in piece.parts().values()]
        held = sum(part.tensor.nbytes for part in parts)
        state.losses.history = "told"
        saver = Saver(folder, 0)
        saver.save(Checkpoint(3, {}, "p"), state)
        saver.finish()
        saver.close()
        has_received = received[0]
        digests = state.sha256(), state.compare_weights(), state.digest_each()
        return {
            "digests": digests,
            "has_read_what_it_holds": has_read == (0 if source is None else held),
            "received_bytes": has_received,
            "others_bytes": sum(tensor.nbytes for tensor in WHOLE.values()) - held,
        }


def test_any_number_of_ranks_loads_what_any_other_has_saved(ranks: Ranks, tmp_path: Path) -> None:
    """By whole tensors' names, of 3 ranks, then 2, 1 and 4; what is split by four is held by all
    where there is one. A rank reads what it holds and receives what it writes; digests are those of
    whole tensors.
    """
    source, digests = None, []
    for world_size in (3, 2, 1, 4):
        run = tmp_path / str(world_size)
        first, *others = ranks.shared(world_size, save_and_load, run, source)
        folder, source = run / "step-00000003", run
        tensors = load_file(folder / "state.safetensors")
        for piece in ("parameter", "replica", "server"):
            if (folder / f"{piece}.safetensors").exists():
                own = load_file(folder / f"{piece}.safetensors")
                tensors |= {f"{piece}/{name}": tensor for name, tensor in own.items()}
        assert tensors.keys() == WHOLE.keys()
        assert all(torch.equal(tensors[name], WHOLE[name]) for name in WHOLE), world_size
        assert (folder / "parameter.safetensors").exists() == (world_size != 1)
        assert all(rank["has_read_what_it_holds"] for rank in (first, *others))
        assert first["received_bytes"] == first["others_bytes"]
        assert [rank["received_bytes"] for rank in others] == [0] * len(others)
        assert all(rank["digests"][:2] == first["digests"][:2] for rank in others)
        digests.append(first["digests"])  # the last of which rank 0 writes
    assert digests == [digests[0]] * 4
    assert list(digests[0][2]) == [*WHOLE, "losses"]


def refused() -> list[str]:
    """What is said of a NaN that one rank alone holds; of rows that nobody holds, or two shapes."""
    said = []
    with join("cpu") as world:
        state = state_on(world, 1)
        broken = [part for name, part in state.pieces["replica"].parts().items() if name == "1/a"]
        for part in broken:
            part.tensor[4, 1] = float("nan")
        try:
            state.check_finite()
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


def test_what_cannot_be_saved_is_refused_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks.shared(2, refused)
    assert first == second
    not_finite, missing, unlike = first
    assert "replica/1/a" in not_finite
    assert all(word in missing for word in ("row 2 of w", "8"))
    assert all(word in unlike for word in ("rank 1", "(2, 3)", "(2, 4)"))


def resumed_by(rank: int, run: str) -> str:
    """What a rank says if one rank alone is told to resume."""
    with join("cpu") as world:
        try:
            find_start(world, run if world.rank == rank else None)
        except AgreementError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resume_of_some_ranks_is_refused_on_all(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    first, second = ranks.shared(2, resumed_by, rank, str(tmp_path))
    assert first == second
    assert f"rank {rank}" in first
