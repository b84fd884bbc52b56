"""A training by torchrun and DDP to which a fault happens: what `scoreboard` compares with.

    torchrun --standalone --nproc-per-node 3 benchmarks/faults/ddp_victim.py FAULT RANK STEP FOLDER

Written as the tutorials do: Gloo with a time-out of 15 s, DistributedDataParallel, a checkpoint by
torch.save on rank 0 every few steps, resumed where there is one.
"""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "preempt": signal.SIGTERM}
TIMEOUT = timedelta(seconds=15)
STEPS = 200
EVERY = 20


def main() -> None:
    fault, victim, at, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    network = nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten()
    ).append(nn.Linear(800, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    saved = folder / "checkpoint.pt"
    first = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    for step in range(first + 1, STEPS + 1):
        if rank == victim and step == at and not is_again:
            (folder / "injected").touch()
            if happen(fault):
                break
        generator = torch.Generator().manual_seed(step * 64 + rank)
        images = torch.rand(8, 1, 28, 28, generator=generator)
        labels = torch.randint(10, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if rank == 0 and step % EVERY == 0:
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, saved)
    dist.destroy_process_group()


def happen(fault: str) -> bool:
    """Whether the rank leaves its loop, as one does whose data end early."""
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
    elif fault == "link_cut":
        subprocess.run(["ip", "link", "set", "veth0", "down"], check=True)
    elif fault == "launcher_killed":
        os.kill(os.getppid(), signal.SIGKILL)
    elif fault == "out_of_memory":
        torch.empty(1 << 50, dtype=torch.uint8)
    elif fault == "exception":
        raise ArithmeticError("injected exception")
    return fault == "data_end"


if __name__ == "__main__":
    main()
