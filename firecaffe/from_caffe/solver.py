"""Converts a solver: update rule, and length, tests, snapshots, seed and device of its training.

Source: BVLC/caffe, src/caffe/proto/caffe.proto (SolverParameter, its defaults) and
src/caffe/solvers. Checked against a real Caffe.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from firecaffe.caffe.message import Message
from firecaffe.from_caffe import Report

TYPES: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum",),
    "Nesterov": ("momentum",),
    "AdaGrad": ("delta",),
    "RMSProp": ("rms_decay", "delta"),
    "AdaDelta": ("momentum", "delta"),
    "Adam": ("momentum", "momentum2", "delta"),
}
"""The numbers of Caffe's solvers, which have ours' names, in the order of the enum solver_type."""

ENUM = {kind.upper(): kind for kind in TYPES}

ITS_FORM = ("SGD", "Nesterov", "Adam")
"""The solvers whose update rule differs from torch's."""

DEFAULTS = {
    "momentum": 0.0,
    "momentum2": 0.999,
    "rms_decay": 0.99,
    "delta": 1e-8,
    "gamma": 0.0,
    "power": 0.0,
}
"""Caffe's defaults. A recipe has other defaults, so all values are written to it."""

POLICIES: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "step": ("gamma", "stepsize"),
    "exp": ("gamma",),
    "inv": ("gamma", "power"),
    "multistep": ("gamma", "stepvalue"),
    "poly": ("power",),
    "sigmoid": ("gamma", "stepsize"),
}

REGULARIZATIONS = ("L2", "L1")


def read_update(solver: Message, iter_size: int, report: Report) -> dict[str, Any]:
    """Return the section [solver] without multipliers. Raises CaffeError if it is unsupported."""
    return {
        **_type(solver, report),
        **_rate(solver, report),
        **_decay(solver, report),
        **_clip(solver, iter_size, report),
    }


def _type(solver: Message, report: Report) -> dict[str, Any]:
    kind, field = _kind(solver)
    settings: dict[str, Any] = {"type": kind.lower()}
    if solver.number("momentum") and "momentum" not in TYPES[kind]:
        raise solver.error(
            f"momentum is {solver.number('momentum'):g} with type {kind}, which has none; Caffe "
            "refuses it too",
            "momentum",
        )
    settings |= {name: solver.number(name, DEFAULTS[name]) for name in TYPES[kind]}
    if kind in ITS_FORM:
        settings["momentum_form"] = "caffe"
    if kind == "Nesterov" and not settings["momentum"]:
        settings["type"] = "sgd"
        report.differs(solver, field, "Nesterov without a momentum is the same as sgd")
    listed = ", ".join(f"{name} {settings[name]:g}" for name in TYPES[kind])
    report.became(
        solver, field, f"{kind}: solver.type {settings['type']}, {listed}, in Caffe's form"
    )
    _without_effect(solver, "type", kind, TYPES, report)
    return settings


def _kind(solver: Message) -> tuple[str, str]:
    if not solver.has("solver_type"):
        kind = solver.text("type", "SGD")
        if kind not in TYPES:
            raise solver.error(f'type is "{kind}"; expected one of {", ".join(TYPES)}', "type")
        return kind, "type"
    if solver.has("type"):
        raise solver.error(
            "both type and solver_type, which Caffe refuses; expected one of them", "solver_type"
        )
    return ENUM[solver.choice("solver_type", [*ENUM], "SGD")], "solver_type"


def _rate(solver: Message, report: Report) -> dict[str, Any]:
    policy = solver.text("lr_policy")
    if policy not in POLICIES:
        problem = f'lr_policy is "{policy}"' if policy else "there is no lr_policy"
        raise solver.error(f"{problem}; expected one of {', '.join(POLICIES)}", "lr_policy")
    if not solver.has("base_lr"):
        raise solver.error("there is no base_lr; expected the learning rate")
    settings: dict[str, Any] = {"base_lr": solver.number("base_lr"), "lr_policy": policy}
    for name in POLICIES[policy]:
        if name == "stepvalue":
            settings[name] = solver.integers(name)
        elif name == "stepsize":
            settings[name] = solver.integer(name)
        else:
            settings[name] = solver.number(name, DEFAULTS[name])
    if policy == "multistep" and not settings["stepvalue"]:
        settings = {"base_lr": settings["base_lr"], "lr_policy": "fixed"}
        report.differs(solver, "lr_policy", "multistep without a stepvalue is fixed")
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    report.became(solver, "lr_policy", f"the rate: {listed}, by Caffe's formula")
    _without_effect(solver, "lr_policy", policy, POLICIES, report)
    return settings


def _without_effect(
    solver: Message, word: str, choice: str, table: Mapping[str, tuple[str, ...]], report: Report
) -> None:
    for name in sorted({*chain(*table.values())} - {*table[choice]}):
        if solver.has(name):
            what = f"{name} has no effect with {word} {choice}, in Caffe neither"
            report.became(solver, name, what)


def _decay(solver: Message, report: Report) -> dict[str, Any]:
    form = solver.text("regularization_type", "L2")
    if form not in REGULARIZATIONS:
        raise solver.error(
            f'regularization_type is "{form}"; expected L2 or L1', "regularization_type"
        )
    decay = solver.number("weight_decay")
    if not decay:
        return {}
    report.became(
        solver, "weight_decay", f"{form} penalty: solver.weight_decay {decay:g}, after the clip"
    )
    return {"weight_decay": decay} | ({"decay_form": "l1"} if form == "L1" else {})


def _clip(solver: Message, iter_size: int, report: Report) -> dict[str, Any]:
    clip = solver.number("clip_gradients", -1.0)
    if clip < 0:
        return {}
    if clip == 0:
        raise solver.error(
            "clip_gradients is 0, which makes every gradient 0; leave it out not to clip",
            "clip_gradients",
        )
    what = f"solver.clip_gradients {clip / iter_size:g}"
    if iter_size > 1:
        what += (
            f": Caffe clips the sum of {iter_size} passes to {clip:g} and divides it then, here "
            "the mean is clipped"
        )
    report.became(solver, "clip_gradients", what)
    return {"clip_gradients": clip / iter_size}


FORMATS = ("HDF5", "BINARYPROTO")
LOSSES = "every step's loss is in the run's metrics.jsonl, and not averaged"
Tell = Callable[[Report, Message, str, str], None]
NOTES: dict[str, tuple[Callable[[Message, str], object], Tell, str]] = {
    "snapshot_prefix": (
        Message.text,
        Report.differs,
        "checkpoints are in the run's folder (--run.folder names it), each complete: `train "
        "--resume RUN` goes on from it",
    ),
    "snapshot_format": (
        lambda solver, name: solver.choices(name, FORMATS),
        Report.differs,
        "checkpoints are safetensors",
    ),
    "snapshot_after_train": (
        lambda solver, name: not solver.flag(name, True),
        Report.differs,
        "the end is always saved",
    ),
    "snapshot_diff": (Message.flag, Report.lacks, "gradients are not kept in checkpoints"),
    "display": (Message.integers, Report.differs, LOSSES),
    "average_loss": (Message.integers, Report.differs, LOSSES),
    "debug_info": (
        Message.flag,
        Report.differs,
        "means of blobs are not printed; a training with numbers that are not finite ends",
    ),
}
"""Fields without a setting here: whether one is set, and what the report says then."""

MODES = ("CPU", "GPU")
MAX_ITER_SIZE = 1_000_000
SEEDS = 2**63


@dataclass(frozen=True)
class SolverStages:
    """The stages and the level, which select layers of a net besides the phase."""

    stages: tuple[str, ...] = ()
    level: int = 0


@dataclass(frozen=True)
class TrainSettings:
    words: dict[str, dict[str, Any]]
    iter_size: int = 1
    test_iter: tuple[int, ...] = ()
    states: dict[str, SolverStages] = field(default_factory=dict)


def read_training(solver: Message, report: Report) -> TrainSettings:
    iter_size = solver.integer("iter_size", 1)
    if not 1 <= iter_size <= MAX_ITER_SIZE:
        raise solver.error(f"iter_size is {iter_size}; expected 1 or more", "iter_size")
    train = _steps(solver, report) | _seed(solver, report) | _device(solver, report)
    test_iter, every = _tests(solver, report)
    if every:
        train["eval_every"] = every
    sections = {"train": train, "checkpoint": _snapshots(solver, report)}
    for name, (is_set, tell, what) in NOTES.items():
        if is_set(solver, name):
            tell(report, solver, name, what)
    states = {"TRAIN": _state(solver, "train_state"), "TEST": _state(solver, "test_state")}
    return TrainSettings(sections, iter_size, test_iter, states)


def _steps(solver: Message, report: Report) -> dict[str, Any]:
    steps = solver.integer("max_iter")
    if not steps:  # a Python script may count the steps itself
        report.needs(solver, "max_iter", "there is no max_iter; say --train.steps when you train")
        return {}
    if steps < 1:
        raise solver.error(f"max_iter is {steps}; expected how many updates to make", "max_iter")
    report.became(solver, "max_iter", f"train.steps {steps}")
    return {"steps": steps}


def _seed(solver: Message, report: Report) -> dict[str, Any]:
    seed = solver.integer("random_seed", -1)
    if seed >= SEEDS:
        raise solver.error(f"random_seed is {seed}; expected less than 2^63", "random_seed")
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
            "test_iter",
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
    every = solver.integer("snapshot")
    if every < 0:
        raise solver.error(f"snapshot is {every}; expected 0 or more", "snapshot")
    if not every:
        return {}
    report.became(solver, "snapshot", f"checkpoint.every {every}; all are kept")
    return {"every": every, "keep_last": 0}


def _state(solver: Message, name: str) -> SolverStages:
    """Return the state for the first net of a phase."""
    states: Sequence[Message] = solver.messages(name)
    if not states:
        return SolverStages()
    for state in states:  # only the first net is tested
        state.ignore("phase", "stage", "level")
    return SolverStages(tuple(states[0].texts("stage")), states[0].integer("level"))
