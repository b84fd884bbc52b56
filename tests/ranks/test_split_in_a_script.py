"""`firecaffe.adapt.split_layers` in a loop of one's own: timed, and in local SGD."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import firecaffe
from firecaffe.errors import RecipeError
from firecaffe.parallel.layer_split import Split
from firecaffe.runs.rank_times import explain
from tests.world import Ranks

WORDS = {"0": "neurons", "3": "inputs"}
STEPS, EVERY = 10, 4


def network(row: dist.ProcessGroup | None = None) -> Split:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Dropout(), nn.Linear(20, 2))
    return firecaffe.adapt.split_layers(model, WORDS, row, parts=4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(16, 8)).square().mean())
        optimizer.step()


def groups(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's."""
    made: list[dist.ProcessGroup] = [dist.new_group(list(part)) for part in parts]
    return next(group for group, part in zip(made, parts, strict=True) if dist.get_rank() in part)


def replicas(rows: list[list[int]], columns: list[list[int]]) -> dict[str, Tensor]:
    """The whole network of two replicas, on the first rank of each row."""
    dist.init_process_group("gloo")
    row, column = groups(rows), groups(columns)
    number = next(place for place, ranks in enumerate(rows) if dist.get_rank() in ranks)
    model = network(row)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    words = {"every": EVERY, "outer": "nesterov"}
    averaged = firecaffe.adapt.average_locally(model, optimizer, process_group=column, **words)  # type: ignore[arg-type]
    train(model, optimizer, 10 + number)
    averaged.average()
    return model.whole_state_dict()


def test_replicas_that_are_split_end_in_the_bits_of_whole_ones(ranks: Ranks) -> None:
    alone, other = ranks.run(2, replicas, [[0], [1]], [[0, 1]])
    split = ranks.run(4, replicas, [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert split[1] == split[3] == {}
    for found in (other, split[0], split[2]):
        assert found.keys() == alone.keys()
        assert all(found[name].equal(each) for name, each in alone.items())


def average_all() -> str:
    model = network()
    try:
        firecaffe.adapt.average_locally(model, torch.optim.SGD(model.parameters(), 0.1))
    except RecipeError as error:
        return str(error)
    return "it was averaged"


def test_parts_of_one_network_are_not_averaged(ranks: Ranks) -> None:
    [said, *others] = ranks.run(2, average_all)
    assert "split over the ranks 0, 1" in said
    assert "process_group must be the ranks that have the same parts" in said
    assert others == [said]


def timed(folder: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = firecaffe.adapt.attach(model, optimizer, folder)
    train(model, optimizer, 1)
    attached.detach()


def test_waits_for_activations_are_told(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, timed, str(tmp_path))
    for rank in explain(tmp_path).ranks:
        assert rank.steps == STEPS
        assert 0 < rank.waits_s["activations"] <= rank.parts_s["exposed_communication_s"]
        assert rank.parts_s["compute_s"] >= 0
