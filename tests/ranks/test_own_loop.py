"""`firecaffe.adapt` in a loop of one's own: `split_layers` under DDP, in local SGD, timed, and what
ranks must have alike; `attach` where no RANK is set, and after a restart of torchrun's.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import firecaffe
from firecaffe.cluster.agree import digest
from firecaffe.errors import AgreementError, RecipeError, RunError
from firecaffe.parallel.layer_split import Split
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.script import attach
from tests.ranks.test_split_parts import WORDS, Small
from tests.world import Ranks

STEPS, EVERY = 10, 4


def groups(parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    made: list[dist.ProcessGroup] = [dist.new_group(list(part)) for part in parts]
    return next(group for group, part in zip(made, parts, strict=True) if dist.get_rank() in part)


def pairs_of_ranks() -> str:
    """Two pairs of ranks with halves of a batch, each pair one model: DDP sums between them."""
    dist.init_process_group("gloo")
    try:
        pair, across = groups([[0, 1], [2, 3]]), groups([[0, 2], [1, 3]])
        torch.manual_seed(3)
        split = firecaffe.adapt.split_layers(Small(), WORDS, pair, parts=4)
        both = nn.parallel.DistributedDataParallel(split, process_group=across)
        torch.manual_seed(dist.get_rank() // 2)
        x = torch.randn(4, 3, 24, 24)
        both.eval()  # without dropout and statistics, the gradients are those of all samples
        F.cross_entropy(both(x), torch.arange(4) % 5).backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: each.grad for name, each in split.named_parameters() if each.grad is not None
        }
        del both, split
        return digest(sorted(gradients.items()))
    finally:
        dist.destroy_process_group()


def test_pairs_of_ranks_under_ddp(ranks: Ranks) -> None:
    by_rank = ranks.run(4, pairs_of_ranks)
    assert by_rank[:2] == by_rank[2:]
    assert by_rank[0] != by_rank[1]


def wrong(what: str) -> str:
    torch.manual_seed(3)
    model = Small()
    try:
        if what == "parts":
            firecaffe.adapt.split_layers(model, WORDS, parts=3)
        words = {"classifier.*": "neurons"}
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if what == "words" and rank == 1:
            words = {"classifier.*": "inputs"}
        split: Split = firecaffe.adapt.split_layers(model, words, parts=2)
        torch.manual_seed(rank if what == "random" else 0)
        split(torch.ones(2, 3, 24, 24) * (rank if what == "input" else 1))
        return "nothing"
    except (RecipeError, AgreementError) as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("parts", "3 parts equally; take parts=2 or 4"),
        ("words", "the words of split"),
        ("input", "what it gives the split network"),
        ("random", "random numbers"),
    ],
)
def test_what_ranks_must_have_alike(ranks: Ranks, what: str, named: str) -> None:
    assert all(named in said for said in ranks.shared(2, wrong, what))


def network(row: dist.ProcessGroup | None = None) -> Split:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Dropout(), nn.Linear(20, 2))
    return firecaffe.adapt.split_layers(model, {"0": "neurons", "3": "inputs"}, row, parts=4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(16, 8)).square().mean())
        optimizer.step()


def replicas(rows: list[list[int]], columns: list[list[int]]) -> dict[str, Tensor]:
    """The whole network of two replicas, on the first rank of each row."""
    dist.init_process_group("gloo")
    row, column = groups(rows), groups(columns)
    number = next(place for place, ranks in enumerate(rows) if dist.get_rank() in ranks)
    model = network(row)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    averaged = firecaffe.adapt.average_locally(
        model, optimizer, every=EVERY, outer="nesterov", process_group=column
    )
    train(model, optimizer, 10 + number)
    averaged.average()
    return model.whole_state_dict()


def test_replicas_that_are_split_end_in_the_bits_of_whole_ones(ranks: Ranks) -> None:
    alone, other = ranks.run(2, replicas, [[0], [1]], [[0, 1]])
    split = ranks.run(4, replicas, [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert split[1] == split[3] == {}
    for state in (other, split[0], split[2]):
        assert state.keys() == alone.keys()
        assert all(state[name].equal(each) for name, each in alone.items())


def timed(folder: str) -> str:
    """What is said where parts of one network are to be averaged."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = firecaffe.adapt.attach(model, optimizer, folder)
    train(model, optimizer, 1)
    attached.detach()
    with pytest.raises(RecipeError, match="process_group") as caught:
        firecaffe.adapt.average_locally(model, optimizer)
    return str(caught.value)


def test_waits_for_activations_are_told_and_parts_are_not_averaged(
    ranks: Ranks, tmp_path: Path
) -> None:
    said, other = ranks.run(2, timed, str(tmp_path))
    assert "split over the ranks 0, 1" in said
    assert other == said
    for rank in explain(tmp_path).ranks:
        assert rank.steps == STEPS
        assert 0 < rank.waits_s["activations"] <= rank.parts_s["exposed_communication_s"]
        assert rank.parts_s["compute_s"] >= 0


def train_attached(folder: str, steps: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = firecaffe.adapt.attach(model, optimizer, folder)
    if dist.is_initialized():
        dist.barrier()  # as DDP's first step is
    for _ in range(steps):
        torch.autograd.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    attached.detach()


def attempt(folder: str, number: int, steps: int) -> str:
    attach._PROCESS = str(number)  # each attempt is a process of its own
    try:
        train_attached(folder, steps)
    except RunError as error:
        return str(error)
    if dist.is_initialized():
        dist.barrier()
    return ""


def attach_in_turns(folder: str) -> list[str]:
    """Three attempts of one script, of which the second is lost one step early on rank 1; then a
    second run of the third attempt into the same folder."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.pop(name)
    turns = ((0, 2), (1, 4 - rank), (2, 1), (2, 1))
    return [attempt(folder, number, steps) for number, steps in turns]


def test_rank_and_restart(ranks: Ranks, tmp_path: Path) -> None:
    for rank, said in enumerate(ranks.run(2, attach_in_turns, str(tmp_path))):
        assert said[:3] == [""] * 3
        assert f"rank-{rank}.jsonl exists already" in said[3]
    rows = read_timings(tmp_path)
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in rows[1]] == [1, 2, 3, 4, 5, 7]


def test_a_restart_does_not_open_the_folder_of_another_run(ranks: Ranks, tmp_path: Path) -> None:
    """The first attempt is refused; so is the next."""
    (tmp_path / "timings").mkdir()
    (tmp_path / "timings" / "rank-0.jsonl").touch()
    for number in range(2):
        assert "exists already" in ranks.run(1, attempt, str(tmp_path), number, 1)[0]
