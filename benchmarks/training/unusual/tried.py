"""What one case comes to on this rank: trained, refused, taken up again, and loaded."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

import firecaffe
from benchmarks.training.unusual.cases import CASES, Case, data
from benchmarks.training.unusual.layers import CLASSES
from firecaffe import (
    CheckpointConfig,
    DataConfig,
    Recipe,
    Result,
    RunConfig,
    SolverConfig,
    TaskConfig,
    TrainConfig,
)
from firecaffe.data.own_data import check_own
from firecaffe.errors import FirecaffeError
from firecaffe.training.checkpoint import checkpoint_name

STEPS, HALF = 6, 3
"""Four micro-batches a step; an epoch is two steps and a short one."""


@dataclass(frozen=True)
class Tried:
    """What a case came to on a rank; the same on all."""

    line: str = ""
    """What has refused it; empty if it was trained."""
    weights: str = ""
    state: str = ""
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    loads: bool = True
    """Whether the network that was loaded gives the bits of the one that was trained: rank 0's, who
    has written it."""


def try_case(case: Case, folder: Path, resume: Path | None = None) -> Tried:
    """Trains a case in the world of this rank. resume: the run that it is taken up from."""
    samples = data(case)
    recipe = Recipe(
        train=TrainConfig(global_batch_size=32, micro_batch_size=8, steps=STEPS, device="cpu"),
        solver=SolverConfig(base_lr=0.05, momentum=0.9),
        data=DataConfig(),
        task=TaskConfig(args={"num_classes": CLASSES}),
        checkpoint=CheckpointConfig(every=HALF, keep_last=4),
        run=RunConfig(folder=str(folder), tensorboard=False, digests=True),
    )
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            result = firecaffe.train(
                recipe, case.make, samples, samples, loss=case.loss, resume=resume
            )
    except FirecaffeError as error:
        return Tried(line=str(error))
    return Tried(
        weights=result.weights_sha256,
        state=result.state_sha256,
        doubts=tuple(result.identity_doubts),
        notes=tuple(said.getvalue().splitlines()),
        loads=_loads(case, result, folder) if said.getvalue() else True,
    )


def _loads(case: Case, result: Result, folder: Path) -> bool:
    inputs, _ = check_own("set", data(case)).batch(torch.arange(8))
    outputs = []
    for network in (firecaffe.load(folder, model=case.make), result.model):
        torch.manual_seed(0)
        outputs.append(network(inputs))
    return torch.equal(*outputs)


def folder_of(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


def try_all(names: list[str], folder: str, resume: str = "") -> dict[str, Tried]:
    """Each case by its name, in folders of these names. resume: where those are that it is taken
    up from, each after half of its steps.
    """
    found = {}
    for name in names:
        place = folder_of(name)
        begun = Path(resume, place, "checkpoints", checkpoint_name(HALF))
        is_there = bool(resume) and begun.is_dir()  # not of one that was refused
        found[name] = try_case(CASES[name], Path(folder, place), begun if is_there else None)
    return found
