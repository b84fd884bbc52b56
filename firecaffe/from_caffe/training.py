"""Convert a solver's training length, tests, snapshots, seed and device (src/caffe/solver.cpp)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from firecaffe.caffe.message import Message
from firecaffe.from_caffe.import_report import Report

FORMATS = ("HDF5", "BINARYPROTO")
MODES = ("CPU", "GPU")
MOST_ITER_SIZE = 1_000_000
SEEDS = 2**63


@dataclass(frozen=True)
class State:
    """The stages and level that select layers of a net, besides the phase."""

    stages: tuple[str, ...] = ()
    level: int = 0


@dataclass(frozen=True)
class Around:
    words: dict[str, dict[str, Any]]
    iter_size: int = 1
    test_iter: tuple[int, ...] = ()
    states: dict[str, State] = field(default_factory=dict)


def read_training(solver: Message, report: Report) -> Around:
    iter_size = solver.integer("iter_size", 1)
    if not 1 <= iter_size <= MOST_ITER_SIZE:
        raise solver.error(
            f"iter_size is {iter_size}; expected 1 or more", solver.line_of("iter_size")
        )
    train = _steps(solver, report) | _seed(solver, report) | _device(solver, report)
    test_iter, every = _tests(solver, report)
    if every:
        train["eval_every"] = every
    sections = {"train": train, "checkpoint": _snapshots(solver, report)}
    _shown(solver, report)
    states = {"TRAIN": _state(solver, "train_state"), "TEST": _state(solver, "test_state")}
    return Around(sections, iter_size, test_iter, states)


def _steps(solver: Message, report: Report) -> dict[str, Any]:
    steps = solver.integer("max_iter")
    if not steps:  # a caller from Python may count the steps itself
        report.needs(solver, "max_iter", "there is no max_iter; say --train.steps when you train")
        return {}
    if steps < 1:
        raise solver.error(
            f"max_iter is {steps}; expected how many updates to make", solver.line_of("max_iter")
        )
    report.became(solver, "max_iter", f"train.steps {steps}")
    return {"steps": steps}


def _seed(solver: Message, report: Report) -> dict[str, Any]:
    seed = solver.integer("random_seed", -1)
    if seed >= SEEDS:
        raise solver.error(
            f"random_seed is {seed}; expected less than 2^63", solver.line_of("random_seed")
        )
    if seed < 0:
        if solver.has("random_seed"):
            report.differs(
                solver,
                "random_seed",
                "Caffe takes the clock; train.seed is 0 until you say another",
            )
        return {}
    report.differs(
        solver,
        "random_seed",
        f"train.seed {seed}; its numbers are drawn by other generators than Caffe's",
    )
    return {"seed": seed}


def _device(solver: Message, report: Report) -> dict[str, Any]:
    mode = solver.choice("solver_mode", MODES, "GPU")
    solver.ignore("device_id", "layer_wise_reduce")
    if solver.has("device_id"):
        report.differs(solver, "device_id", "each worker takes the GPU of its rank")
    if mode == "CPU":
        report.became(solver, "solver_mode", "train.device cpu")
        return {"device": "cpu"}
    if solver.has("solver_mode"):
        report.became(solver, "solver_mode", "train.device auto: a GPU if there is one")
    return {}


def _tests(solver: Message, report: Report) -> tuple[tuple[int, ...], int]:
    counts, every = solver.integers("test_iter"), solver.integer("test_interval")
    if counts and every < 1:
        raise solver.error(
            f"test_iter is given with test_interval {every}; expected 1 or more, as Caffe does",
            solver.line_of("test_iter"),
        )
    if not every or not counts:
        solver.flag("test_initialization")
        solver.flag("test_compute_loss")
        return (), 0
    report.became(solver, "test_interval", f"train.eval_every {every}")
    if solver.flag("test_initialization", True):
        report.differs(
            solver,
            "test_initialization",
            f"Caffe also tests before the first step; here the first test is after {every} steps",
        )
    if solver.has("test_compute_loss"):
        solver.flag("test_compute_loss")
        report.became(solver, "test_compute_loss", "the loss is computed in every test")
    return tuple(counts), every


def _snapshots(solver: Message, report: Report) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    every = solver.integer("snapshot")
    if every < 0:
        raise solver.error(f"snapshot is {every}; expected 0 or more", solver.line_of("snapshot"))
    if every:
        settings = {"every": every, "keep_last": 0}
        report.became(solver, "snapshot", f"checkpoint.every {every}; all are kept")
    if solver.text("snapshot_prefix"):
        report.differs(
            solver,
            "snapshot_prefix",
            "checkpoints are in the run's folder (--run.folder names it), each complete: `train "
            "--resume RUN` goes on from it",
        )
    if solver.has("snapshot_format"):
        solver.choice("snapshot_format", FORMATS, "BINARYPROTO")
        report.differs(
            solver,
            "snapshot_format",
            "checkpoints are safetensors",
        )
    if not solver.flag("snapshot_after_train", True):
        report.differs(solver, "snapshot_after_train", "the end is always saved")
    if solver.flag("snapshot_diff"):
        report.lacks(solver, "snapshot_diff", "gradients are not kept in checkpoints")
    return settings


def _shown(solver: Message, report: Report) -> None:
    for name in ("display", "average_loss"):
        if solver.has(name):
            solver.integer(name)
            report.differs(
                solver, name, "every step's loss is in the run's metrics.jsonl, and not averaged"
            )
    if solver.flag("debug_info"):
        report.differs(
            solver,
            "debug_info",
            "means of blobs are not printed; a training with numbers that are not finite ends",
        )


def _state(solver: Message, name: str) -> State:
    """Return the state for the first net of a phase."""
    states: Sequence[Message] = solver.messages(name)
    if not states:
        return State()
    for state in states:  # only the first net is tested
        state.ignore("phase", "stage", "level")
    return State(tuple(states[0].texts("stage")), states[0].integer("level"))
