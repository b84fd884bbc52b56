"""`firecaffe.adapt.attach` under launchers that set no RANK, and after a restart of torchrun's."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import firecaffe
from firecaffe.errors import RunError
from firecaffe.runs.rank_times import read_timings
from tests.world import Ranks


def train(folder: str, steps: int) -> None:
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
    """What is said of an attempt of torchrun's."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    try:
        train(folder, steps)
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
