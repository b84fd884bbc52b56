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


def attach_in_turns(folder: str) -> list[str]:
    """Three attempts of one script, of which the second is lost one step early on rank 1; then a
    second run of the third attempt into the same folder."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.pop(name)
    for attempt, steps in enumerate((2, 4 - rank, 1)):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        train(folder, steps)
        dist.barrier()
    refused = []
    try:
        train(folder, 1)
    except RunError as error:
        refused.append(str(error))
    return refused


def test_rank_and_restart(ranks: Ranks, tmp_path: Path) -> None:
    for rank, [message] in enumerate(ranks.run(2, attach_in_turns, str(tmp_path))):
        assert f"rank-{rank}.jsonl exists already" in message
    rows = read_timings(tmp_path)
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in rows[1]] == [1, 2, 3, 4, 5, 7]


def attach_to_a_foreign_folder(folder: str) -> str:
    """The first attempt is refused; so is the next."""
    messages = []
    for attempt in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        try:
            train(folder, 1)
        except RunError as error:
            messages.append(str(error))
    return " ".join(messages)


def test_a_restart_does_not_open_the_folder_of_another_run(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "timings").mkdir()
    (tmp_path / "timings" / "rank-0.jsonl").touch()
    [messages] = ranks.run(1, attach_to_a_foreign_folder, str(tmp_path))
    assert messages.count("exists already") == 2
