"""The defaults as they are typed, against a plain DDP script over Gloo: the step of rank 0.

    sudo -E python -m benchmarks.training.as_typed               # all rows, a quarter of an hour
    sudo -E python -m benchmarks.training.as_typed --row "8, 1gbit"     # this one; the others stay

`firecaffe train recipes/nin_cifar.toml` with no word on the exchange, and `as_typed_ddp`
on the same network and batches. Both run as new processes, in pairs, who is first in turn. Before
a row is timed DDP's gradient is compared with that of one process, and every training of ours has
to end in the weights of one worker. Emulated hosts have no share of the processors of their own:
whoever waits leaves them to the others, on both sides.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.emulated.forked_ranks import Place, on_hosts, on_one_host, run
from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.training.as_typed_rank import ddp, ours
from firecaffe.files import write_atomically
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.plugins import VARIABLE as PLUGINS

RECORD = Path(__file__).parents[1] / "results" / "as_typed.json"

FIRST, TIMED, PAIRS = 2, 5, 3
"""Steps that warm up, and steps that are timed, of each training; and trainings of each side."""

TIMEOUT_S = 300.0

Measured = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """So many hosts with links of a rate, or, without one, so many ranks of one host."""

    ranks: int
    rate: str = ""

    @property
    def name(self) -> str:
        return f"{self.ranks}, {self.rate or 'one host'}"

    @property
    def words(self) -> tuple[str, ...]:
        """Words beside the recipe, whose 8 micro-batches are too few for 16 workers."""
        return ("--train.micro_batch_size=8",) if self.ranks > 8 else ()


ROWS = [Row(hosts, rate) for rate in ("100mbit", "1gbit") for hosts in (2, 4, 8, 16)]
ROWS += [Row(ranks) for ranks in (2, 4)]

HEAD = """# As typed

    sudo -E python -m benchmarks.training.as_typed

`firecaffe train recipes/nin_cifar.toml` with no word on the exchange, against a plain DDP script
over Gloo ([script](../training/as_typed_ddp.py)) on the same network and the same batches of 128,
which lie in its memory from the start. On 16 hosts with `--train.micro_batch_size 8`, for the
recipe's 8 micro-batches are too few. Emulated hosts, one worker each, on the same processors; one
thread a rank. Each training is new processes; they come in pairs, who is first in turn. After two
steps that warm up the median is taken of some steps of rank 0 (n: pairs x steps). A time is the
median over trainings, the ratio that over pairs (ratios: the least and the largest). Beforehand
DDP's gradient was that of one process; every training of ours ended in the weights of one worker.

| hosts | link | n | DDP, s | ours, s | ours / DDP | ratios | `auto` took |
|---|---|---|---|---|---|---|---|"""


class Trainings:
    """Trainings of both kinds in one place. folder: for what they leave."""

    def __init__(self, place: Place, folder: Path, timed: int) -> None:
        self._place, self._folder, self.timed = place, folder, timed
        self._numbers = count()
        folder.mkdir()

    def check_ddp(self) -> None:
        """Raises: RankError if DDP's gradient is not the whole batch's, or it does not train."""
        self._step_s(ddp, True, 1)

    def ddp(self) -> float:
        """The step of rank 0, in seconds."""
        return self._step_s(ddp, False, self.timed)

    def ours(self, words: Sequence[str] = ()) -> tuple[float, Measured]:
        """The same, and the run's result.json."""
        folder = self._folder / f"run-{next(self._numbers)}"
        step_s = self._step_s(ours, [f"--run.folder={folder}", *words], self.timed)
        return step_s, read_run_file(folder, "result.json")

    def _step_s(self, function: Callable[..., int], argument: object, timed: int) -> float:
        out, port = self._folder / "starts.json", 29500 + next(self._numbers)
        steps = FIRST + timed + 1  # a step ends when the next one begins
        run(function, [argument, steps, out], self._place, port, self._folder, TIMEOUT_S)
        starts = json.loads(out.read_text("utf-8"))["starts"]
        assert len(starts) == steps
        return float(median(end - begin for begin, end in pairwise(starts[FIRST:])))


def measure(row: Row, trainings: Trainings, weights: str, pairs: int) -> Measured:
    """weights: the digest that one worker ends in. Raises: SystemExit if a training has others."""
    trainings.check_ddp()
    ours_s, ddp_s, reasons = list[float](), list[float](), list[str]()
    for number in range(pairs):
        for is_ours in (True, False)[:: -1 if number % 2 else 1]:
            if not is_ours:
                ddp_s.append(trainings.ddp())
                continue
            step_s, result = trainings.ours(row.words)
            if result["weights_sha256"] != weights:
                raise SystemExit(f"{row.name}: other weights than those of one worker")
            ours_s.append(step_s)
            reasons.append(result["exchange_choice"]["reason"])
        print(f"{row.name}: ours {ours_s[-1]:.3f} s, DDP {ddp_s[-1]:.3f} s", flush=True)
    return {
        **asdict(row),
        "timed": trainings.timed,
        "ours_s": ours_s,
        "ddp_s": ddp_s,
        "reason": reasons[0],
        "on": f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "commit": commit()[:12],
    }


def page(record: dict[str, Measured]) -> str:
    """The page of the rows that are in the record, in the order of `ROWS`."""
    done = [record[row.name] for row in ROWS if row.name in record]
    lines = [HEAD]
    for each in done:
        ratios = [o / d for o, d in zip(each["ours_s"], each["ddp_s"], strict=True)]
        hosts = each["ranks"] if each["rate"] else f"1, {each['ranks']} ranks"
        lines.append(
            f"| {hosts} | {each['rate'] or '-'} | {len(ratios)} x {each['timed']} "
            f"| {median(each['ddp_s']):.3f} "
            f"| {median(each['ours_s']):.3f} | {median(ratios):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} | `{each['reason'].split(' ')[0]}` |"
        )
    lines += ["", "What the first training of each row said of its exchange:", ""]
    lines += [f"- {Row(each['ranks'], each['rate']).name}: {each['reason']}" for each in done]
    on = dict.fromkeys(f"{each['on']}, commit {each['commit']}" for each in done)
    return "\n".join([*lines, "", f"{'; '.join(on)}.", ""])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--row", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, default=TIMED, help="that are timed")
    parser.add_argument("--record", type=Path, default=RECORD, help="the page lies beside it")
    given = parser.parse_args(argv)
    record: dict[str, Measured] = {}
    if given.record.exists():
        record = json.loads(given.record.read_text("utf-8"))
    weights: dict[tuple[str, ...], str] = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        os.environ[PLUGINS] = "benchmarks.kit.step_starts"
        for row in (row for row in ROWS if row.name in given.row):
            # Emulated links are nothing that the user should have remembered at home.
            os.environ["HOME"] = str(home / row.name)
            if row.words not in weights:
                alone = Trainings(on_one_host(1), home / f"alone {row.ranks}", given.steps)
                weights[row.words] = alone.ours(row.words)[1]["weights_sha256"]
            with ExitStack() as stack:
                place = on_one_host(row.ranks)
                if row.rate:
                    cluster = VirtualCluster(row.ranks, parse_rate(row.rate))
                    place = on_hosts(stack.enter_context(cluster))
                trainings = Trainings(place, home / row.name, given.steps)
                record[row.name] = measure(row, trainings, weights[row.words], given.pairs)
            text = json.dumps(record, indent=1)
            write_atomically(given.record, text + "\n")
            write_atomically(given.record.with_suffix(".md"), page(record))


if __name__ == "__main__":
    main()
