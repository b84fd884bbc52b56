"""Images/s of asynchronous training whose pushes are encoded, against pushes as they are.

    python -m benchmarks.synchrony.pushed_codecs --hosts 2 --out TWO.jsonl    # needs root
    python -m benchmarks.synchrony.pushed_codecs --page TWO.jsonl FOUR.jsonl

Emulated hosts of so much of a core each, one rank each, with a micro-batch in flight. In one set of
processes all codecs train in turn, and who comes first changes from round to round.

After each round the same policy runs under the simulated clock: a worker's times are those of the
round's training without a codec, a pull and a push take their bytes over the link's rate. What a
codec takes to encode is not in it.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import firecaffe
from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.kit import raw_lines
from benchmarks.kit.from_first import from_first
from benchmarks.synchrony.modes_events import logged, rates, simulated
from benchmarks.synchrony.modes_speed import EQUAL, PAYLOAD
from benchmarks.synchrony.synchrony_page import cells
from firecaffe.cluster.world import join
from firecaffe.data import TensorDataset
from firecaffe.data.generated import generate
from firecaffe.gradients.config import NO_COMPRESSOR, ExchangeConfig
from firecaffe.models import ModelConfig
from firecaffe.planner.server_costs import Costs
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.run_folder import RunConfig
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Push
from firecaffe.synchrony.server_policies import Leaves

MODULE = "benchmarks.synchrony.pushed_codecs"
MODEL = "lenet"
PARAMETER_BYTES = 1_724_320
RATE = 100_000_000
MICRO_BATCH_SIZE = 64
LEAVES = 48
"""Of a training."""
SKIPPED = 8
"""Leaves at the beginning that are not timed."""
CODECS = (NO_COMPRESSOR, "float16", "int8", "top_k")
WORDS = SynchronyConfig("asynchronous")


def recipe_of(codec: str, hosts: int, folder: Path) -> Recipe:
    """A micro-batch of each step for each host."""
    return Recipe(
        model=ModelConfig(MODEL),
        train=TrainConfig(
            global_batch_size=hosts * MICRO_BATCH_SIZE,
            micro_batch_size=MICRO_BATCH_SIZE,
            steps=LEAVES // hosts,
            seed=1,
            device="cpu",
        ),
        solver=SolverConfig(type="sgd", base_lr=1e-3, momentum=0.0),
        exchange=ExchangeConfig(compressor=codec),
        synchrony=WORDS,
        run=RunConfig(folder=str(folder), tensorboard=False),
    )


def rank_program(hosts: int, rounds: int, out: Path) -> None:
    """Trains with all codecs in turns; rank 0 writes a row for each."""
    torch.set_num_threads(1)
    images, labels = generate()[0].batch(torch.arange(LEAVES * MICRO_BATCH_SIZE))
    train_set, few = TensorDataset(images, labels, 10), TensorDataset(images[:64], labels[:64], 10)
    with join("cpu") as world, TemporaryDirectory() as place:
        folder = Path(from_first(place))
        firecaffe.train(recipe_of(NO_COMPRESSOR, hosts, folder / "before"), None, train_set, few)
        for number in range(rounds):
            turn = number % len(CODECS)
            found: dict[str, Path] = {}
            for codec in (*CODECS[turn:], *CODECS[:turn]):
                found[codec] = folder / f"{number}-{codec}"
                firecaffe.train(recipe_of(codec, hosts, found[codec]), None, train_set, few)
            for codec, run in found.items() if world.is_first else ():
                push_bytes = _push_bytes(run)
                real = rates(logged(run), SKIPPED).leaves_per_s
                foreseen = _simulated(found[NO_COMPRESSOR], hosts, push_bytes)
                row = {"kind": "run", "codec": codec, "round": number, "push_bytes": push_bytes}
                row |= {"leaves_per_s": real, "simulated": foreseen}
                raw_lines.append(out, row)
            dist.barrier()


def _push_bytes(run: Path) -> float:
    """Of a push of rank 1's learner."""
    pushed = json.loads((run / "result.json").read_text())["synchrony"]["pushed_bytes_by_learner"]
    events = (each for each in logged(run) if isinstance(each, Push))
    return float(pushed["1"] / sum(each.work.learner == 1 for each in events))


def _simulated(plain: Path, hosts: int, push_bytes: float) -> float:
    """Leaves a second, at the times of a training without a codec."""
    text = (plain / "timings" / "rank-0.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    took_s: list[list[float]] = [[] for _ in range(hosts)]
    for row in rows[SKIPPED // hosts :]:
        for rank, (count, seconds) in row["by_rank"].items():
            took_s[int(rank)] += [seconds / count] * count
    per_byte_s = 8 / (RATE * PAYLOAD)
    take_s = median(row["update_s"] for row in rows) / hosts
    costs = Costs(PARAMETER_BYTES * per_byte_s, push_bytes * per_byte_s, take_s, hosts)
    leaves = Leaves(0, LEAVES // hosts, LEAVES // hosts, hosts, LEAVES)
    return rates(simulated(WORDS, leaves, took_s, lambda _: 0.0, costs), SKIPPED).leaves_per_s


def page(paths: Sequence[Path]) -> str:
    """The part of the page, from raw rows."""
    rows = []
    for path in paths:
        runs = raw_lines.read(path, "run")
        plain = {row["round"]: row["leaves_per_s"] for row in runs if row["codec"] == NO_COMPRESSOR}
        hosts = raw_lines.read(path, "conditions")[0]["hosts"]
        for codec in CODECS:
            own = [row for row in runs if row["codec"] == codec]
            size_kb = median(row["push_bytes"] for row in own) / 1e3
            rate = median(row["leaves_per_s"] for row in own) * MICRO_BATCH_SIZE
            gains = cells([row["leaves_per_s"] / plain[row["round"]] for row in own])
            clock = median(row["leaves_per_s"] / row["simulated"] for row in own)
            rows.append(
                f"| {hosts} | {codec} | {size_kb:,.0f} | {rate:.0f} | {gains} | {clock:.2f} |"
            )
    said = raw_lines.read(paths[0], "conditions")[0]
    return PART.format(**said, table="\n".join(rows), rate=RATE // 10**6, share=EQUAL)


PART = """
## Encoded pushes, by rate

    python -m benchmarks.synchrony.pushed_codecs --hosts 2 --out TWO.jsonl

{cores} cores of a shared {cpu}, torch {torch}, commit {commit}. Emulated hosts of {share} cores
each and no more, links of {rate} Mbit/s, one rank each; LeNet (1,724 KB), micro-batches of 64,
`asynchronous`, one in flight. Codecs take turns in the same processes. "times" is to no codec in
the same round. "real / simulated" is to the simulated clock, which pulls and pushes the same bytes
at the link's rate and takes no time to encode.

| hosts | codec | KB a push | images/s | n | times, median | from - to | real / simulated |
|---|---|---|---|---|---|---|---|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, choices=(2, 3, 4), default=2)
    parser.add_argument("--out", type=Path, help="raw JSON lines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", type=Path, nargs="+", help="prints the part of raw lines")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.page:
        print(page(given.page))
        return
    if given.rank:
        rank_program(given.hosts, given.rounds, given.out)
        return
    if given.out is None or given.out.exists():
        raise SystemExit("--out names a file that is not there yet")
    command = [sys.executable, "-m", MODULE, "--rank", "--hosts", str(given.hosts)]
    command += ["--out", str(given.out.resolve()), "--rounds", str(given.rounds)]
    with VirtualCluster(given.hosts, RATE, processors=[EQUAL] * given.hosts) as cluster:
        said = {**cluster.conditions(), "cpu": cpu_name(), "torch": torch.__version__}
        said |= {"commit": commit()[:12], "cores": os.cpu_count() or 1, "hosts": given.hosts}
        raw_lines.append(given.out, {"kind": "conditions", **said})
        cluster.run(command, timeout_s=1800.0, environment={})


if __name__ == "__main__":
    main()
