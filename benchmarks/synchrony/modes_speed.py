"""Images/s and staleness of the modes with a server, against the synchronous step and the simulated
clock.

    python -m benchmarks.synchrony.modes_speed --case one_slow --out SPEED.jsonl    # needs root

Emulated hosts have each a share of this machine's processors and no more. In one set of processes
every_step, asynchronous, stale (s = 4) and backup (3 + 1) train in turn, and who comes first
changes from round to round. A case is so many hosts, their processors, and what is late
(`benchmarks.synchrony.stragglers`):

    one_slow         four hosts, one with half the processors
    tenth, each      four equal hosts, with stragglers
    2, 3, 4          so many equal hosts

After each round the same policies run under the simulated clock: a worker's times are those of the
round's synchronous training, and the same micro-batches are late as there; a pull and a push take
their bytes over the link's rate, and an update what it took there. Nothing of what is compared goes
into it.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import firecaffe
from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.kit import raw_lines
from benchmarks.kit.from_first import from_first
from benchmarks.kit.step_starts import STARTS
from benchmarks.synchrony.modes_events import logged, rates, row_of, simulated
from benchmarks.synchrony.stragglers import DELAY, EACH, NONE, TENTH
from firecaffe.cluster.world import join
from firecaffe.data import TensorDataset
from firecaffe.data.generated import generate
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models import ModelConfig, build_model
from firecaffe.planner.server_costs import Costs
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.run_folder import RunConfig
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import EVERY_STEP, SynchronyConfig
from firecaffe.synchrony.server_policies import Leaf, Leaves
from firecaffe.training.plugins import VARIABLE as PLUGINS

MODULE = "benchmarks.synchrony.modes_speed"

RATE = 1_000_000_000
PAYLOAD = 0.956
"""Of a link's rate, at most; `benchmarks.emulated.virtual_cluster`."""

MICRO_BATCH_SIZE = 192
STEPS = 13
SKIPPED = 2
"""Steps at the beginning that are not timed."""


@dataclass(frozen=True)
class Case:
    """What is emulated."""

    processors: list[float]
    """Of a core, for each host."""
    late: str = NONE


EQUAL = 0.4

CASES = {
    "one_slow": Case([EQUAL] * 3 + [EQUAL / 2]),
    "tenth": Case([EQUAL] * 4, TENTH),
    "each": Case([EQUAL] * 4, EACH),
    "2": Case([EQUAL] * 2),
    "3": Case([EQUAL] * 3),
    "4": Case([EQUAL] * 4),
}

MODES: dict[str, dict[str, Any]] = {
    EVERY_STEP: {},
    "asynchronous": {"mode": "asynchronous"},
    "stale": {"mode": "stale", "max_staleness": 4},
    "backup": {"mode": "backup", "backup_workers": 1},
}
"""Words of [synchrony]."""


def recipe_of(mode: str, hosts: int, folder: Path) -> Recipe:
    """A micro-batch of each step for each host."""
    return Recipe(
        model=ModelConfig("googlenet_small_bn"),
        train=TrainConfig(
            global_batch_size=hosts * MICRO_BATCH_SIZE,
            micro_batch_size=MICRO_BATCH_SIZE,
            steps=STEPS,
            seed=1,
            device="cpu",
        ),
        # So low that late gradients do no harm: rates are compared here.
        solver=SolverConfig(type="sgd", base_lr=1e-3, momentum=0.0),
        exchange=ExchangeConfig(algorithm="halving_doubling"),
        synchrony=SynchronyConfig(**MODES[mode]),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )


def rank_program(case: Case, rounds: int, out: Path) -> None:
    """Trains all modes in turns; rank 0 writes a row for each."""
    torch.set_num_threads(1)
    hosts = len(case.processors)
    images, labels = generate()[0].batch(torch.arange(STEPS * hosts * MICRO_BATCH_SIZE))
    train_set, few = TensorDataset(images, labels, 10), TensorDataset(images[:64], labels[:64], 10)

    def train(mode: str, folder: Path) -> firecaffe.Result:
        return firecaffe.train(recipe_of(mode, hosts, folder), train_set=train_set, test_set=few)

    with join("cpu") as world, TemporaryDirectory() as place:
        folder = Path(from_first(place))
        names = list(MODES)
        train(EVERY_STEP, folder / "before")
        DELAY.kind = case.late
        DELAY.micro_batch_s = from_first(min(map(median, _times(folder / "before", hosts))))
        for number in range(rounds):
            turn = number % len(names)
            for mode in (*names[turn:], *names[:turn]):
                result = train(mode, folder / f"{number}-{mode}")
                if world.is_first:
                    row = {
                        "kind": "run",
                        "mode": mode,
                        "round": number,
                        **_row(mode, result, hosts),
                    }
                    raw_lines.append(out, row)
            if world.is_first:
                for row in _simulated(folder / f"{number}-{EVERY_STEP}", hosts):
                    raw_lines.append(out, {"kind": "simulated", "round": number, **row})
            dist.barrier()


def _row(mode: str, result: firecaffe.Result, hosts: int) -> dict[str, Any]:
    if mode != EVERY_STEP:
        found = rates(logged(result.folder), SKIPPED * hosts)
        said = json.loads((result.folder / "result.json").read_text())["synchrony"]
        return {**row_of(found, MICRO_BATCH_SIZE), "idle_by_rank": said["idle_by_rank"]}
    steps_per_s = (len(STARTS) - 1 - SKIPPED) / (STARTS[-1] - STARTS[SKIPPED])
    images_per_s = steps_per_s * hosts * MICRO_BATCH_SIZE
    return {"images_per_s": images_per_s, "steps_per_s": steps_per_s, "staleness": 0.0}


def _simulated(synchronous: Path, hosts: int) -> list[dict[str, Any]]:
    """The modes under the simulated clock, at the times of a synchronous run."""

    def late_s(leaf: Leaf) -> float:
        return DELAY.seconds(leaf.step, leaf.place, hosts)

    took_s = [
        [each - late_s(Leaf(SKIPPED + number, rank)) for number, each in enumerate(times)]
        for rank, times in enumerate(_times(synchronous, hosts))
    ]
    update_s = median(row["update_s"] for row in _rows(synchronous, 0))
    model = recipe_of(EVERY_STEP, hosts, synchronous).model.name
    sent_s = _bytes(model) / (RATE * PAYLOAD / 8)
    leaves = Leaves(0, STEPS, STEPS, hosts, STEPS * hosts)
    rows = []
    for mode in MODES:
        if mode == EVERY_STEP:
            continue
        words = replace(SynchronyConfig(), **MODES[mode])
        updates_s = update_s / (hosts - 1 if mode == "backup" else 1)
        costs = Costs(sent_s, sent_s, updates_s, hosts)
        found = rates(simulated(words, leaves, took_s, late_s, costs), SKIPPED * hosts)
        rows.append({"mode": mode, **row_of(found, MICRO_BATCH_SIZE)})
    return rows


def _bytes(model: str) -> int:
    built = build_model(model, num_classes=10, in_channels=1)
    return sum(each.numel() * each.element_size() for each in built.parameters())


def _times(folder: Path, hosts: int) -> list[list[float]]:
    """Seconds of each rank's micro-batches, with their samples."""
    return [
        [row["data_s"] + row["compute_s"] for row in _rows(folder, rank)[SKIPPED:]]
        for rank in range(hosts)
    ]


def _rows(folder: Path, rank: int) -> Sequence[dict[str, Any]]:
    path = folder / "timings" / f"rank-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    case = CASES[given.case]
    if given.rank:
        rank_program(case, given.rounds, given.out)
        return
    if given.out.exists():
        raise SystemExit(f"{given.out} exists; the rows of two runs are not to be mixed")
    command = [sys.executable, "-m", MODULE, "--rank", "--case", given.case]
    command += ["--out", str(given.out.resolve()), "--rounds", str(given.rounds)]
    with VirtualCluster(len(case.processors), RATE, processors=case.processors) as cluster:
        conditions = {**cluster.conditions(), "cpu": cpu_name(), "torch": torch.__version__}
        conditions |= {"commit": commit()[:12], "cores": os.cpu_count() or 1, "case": given.case}
        raw_lines.append(given.out, {"kind": "conditions", **conditions})
        plugins = {PLUGINS: "benchmarks.kit.step_starts,benchmarks.synchrony.stragglers"}
        cluster.run(command, timeout_s=3600.0, environment=plugins)


if __name__ == "__main__":
    main()
