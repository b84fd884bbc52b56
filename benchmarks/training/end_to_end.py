"""End to end: images/s on slow links against DDP over Gloo, and the accuracy that codecs cost.

    python -m benchmarks.training.end_to_end data --archive cifar10-jpeg.tar.gz --data DATA.pt
    python -m benchmarks.training.end_to_end speed --data DATA.pt --out SPEED.jsonl     # needs root
    python -m benchmarks.training.end_to_end apart --data DATA.pt --out SPEED.jsonl     # needs root
    python -m benchmarks.training.end_to_end same-bits --data DATA.pt --out BITS.jsonl  # needs root
    python -m benchmarks.training.end_to_end accuracy --data DATA.pt --out ACCURACY.jsonl \\
        --minutes 25
    python -m benchmarks.training.end_to_end page --speed SPEED.jsonl --bits BITS.jsonl \\
        --accuracy ACCURACY.jsonl --to benchmarks/results/end_to_end.md

`data` takes an archive of train/CLASS/*.jpg and test/CLASS/*.jpg. `speed` runs one rank on each of
four emulated hosts, with all variants in one process; `apart`, each in processes of its own.
`accuracy` trains the same recipe on two local workers at full speed, since the number of workers
changes no bit, which `same-bits` checks; it goes on where it was interrupted.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.kit import raw_lines
from benchmarks.training.end_to_end_accuracy import One, same_bits, train_all, train_one
from benchmarks.training.end_to_end_apart import VARIANTS
from benchmarks.training.end_to_end_apart import rank_program as apart_rank
from benchmarks.training.end_to_end_apart import run as run_apart
from benchmarks.training.end_to_end_page import make_page
from benchmarks.training.end_to_end_recipe import HOSTS, OURS, convert, open_images
from benchmarks.training.end_to_end_speed import rank_program
from firecaffe.runs.environment import commit, cpu_name


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data")
    data.add_argument("--archive", type=Path, required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("--rounds", type=int, default=7, help="blocks of each variant")
    speed.add_argument("--steps", type=int, default=10, help="of each block")
    speed.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    apart = commands.add_parser("apart")
    apart.add_argument("--rounds", type=int, default=7, help="processes of each variant")
    apart.add_argument("--steps", type=int, default=20, help="of each, after as many that warm up")
    apart_one = commands.add_parser("apart-one", help="one rank of one of them")
    apart_one.add_argument("--variant", choices=VARIANTS, required=True)
    apart_one.add_argument("--steps", type=int, required=True)
    bits = commands.add_parser("same-bits")
    bits.add_argument("--steps", type=int, default=8)
    for command in (speed, apart, bits):
        command.add_argument("--rate", type=parse_rate, default="100mbit")
    accuracy = commands.add_parser("accuracy")
    accuracy.add_argument("--variants", nargs="+", choices=OURS, default=OURS)
    accuracy.add_argument("--seeds", type=int, default=3)
    accuracy.add_argument("--minutes", type=float, default=25.0, help="for all trainings together")
    accuracy.add_argument("--steps", type=int, default=0, help="of each; 0: by --minutes")
    one = commands.add_parser("train-one", help="one rank of one training")
    one.add_argument("--variant", choices=OURS, required=True)
    one.add_argument("--folder", type=Path, required=True)
    for word in ("--seed", "--steps", "--num-test"):
        one.add_argument(word, type=int, required=True)
    for command in (data, speed, apart, apart_one, bits, accuracy, one):
        command.add_argument("--data", type=Path, required=True)
    for command in (speed, apart, bits, accuracy):
        command.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    page = commands.add_parser("page")
    for word in ("--speed", "--bits", "--accuracy", "--to"):
        page.add_argument(word, type=Path, required=True)
    given = parser.parse_args()
    match given.command:
        case "data":
            convert(given.archive, given.data)
        case "speed" if given.rank:
            rank_program(open_images(given.data)[0], given.rounds, given.steps, given.out)
        case "speed":
            run_speed(given)
        case "apart":
            run_apart(given.data, given.out, given.rounds, given.steps, given.rate)
        case "apart-one":
            apart_rank(given.variant, given.data, given.steps)
        case "same-bits":
            same_bits(given.data, given.out, given.steps, given.rate)
        case "accuracy":
            train_all(
                given.data, given.out, given.variants, given.seeds, given.minutes, given.steps
            )
        case "train-one":
            train = One(given.variant, given.seed, given.steps, given.num_test)
            train_one(train, given.data, given.folder)
        case "page":
            given.to.write_text(make_page(given.speed, given.bits, given.accuracy), "utf-8")


def run_speed(given: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "benchmarks.training.end_to_end", "speed", "--rank"]
    command += ["--data", str(given.data), "--out", str(given.out)]
    command += ["--rounds", str(given.rounds), "--steps", str(given.steps)]
    if given.out.exists():
        raise SystemExit(f"{given.out} exists; the blocks of two runs are not to be mixed")
    with VirtualCluster(HOSTS, given.rate) as cluster:
        conditions = {**cluster.conditions(), "cpu": cpu_name(), "torch": torch.__version__}
        conditions["commit"] = commit()[:12]
        raw_lines.append(given.out, {"kind": "conditions", **conditions})
        cluster.run(command, timeout_s=3600.0, live=True)


if __name__ == "__main__":
    main()
