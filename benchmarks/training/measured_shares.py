"""Measured shares: images/s of four hosts of which one has half the processors, and what they cost.

    python -m benchmarks.training.measured_shares speed --out SPEED.jsonl        # needs root
    python -m benchmarks.training.measured_shares exchange --out EXCHANGE.jsonl  # needs root
    python -m benchmarks.training.measured_shares page --speed SPEED.jsonl \\
        --exchange EXCHANGE.jsonl --to benchmarks/results/measured_shares.md

`speed` trains one recipe with equal and with measured shares in turns, on emulated hosts that have
each a share of this machine's processors and no more. Every run must end in the bits of one worker,
which trains first. `exchange` holds computing aside: layers sleep, for as long on every host as
their shares make it equal, and the steps of equal shares and of others take turns.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.kit import raw_lines
from benchmarks.training.measured_shares_exchange import RATE as EXCHANGE_RATE
from benchmarks.training.measured_shares_exchange import rank_program as exchange_rank
from benchmarks.training.measured_shares_page import make_page
from benchmarks.training.measured_shares_speed import (
    HOSTS,
    PROCESSORS,
    RATE,
    alone,
    rank_program,
)
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.training.plugins import VARIABLE as PLUGINS

MODULE = "benchmarks.training.measured_shares"


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("speed", "exchange"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="raw JSON lines")
        command.add_argument("--rounds", type=int, default=7, help="runs, or steps, of each")
        command.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
        command.add_argument("--digest", default="", help=argparse.SUPPRESS)
    page = commands.add_parser("page")
    for word in ("--speed", "--exchange", "--to"):
        page.add_argument(word, type=Path, required=True)
    given = parser.parse_args()
    if given.command == "page":
        given.to.write_text(make_page(given.speed, given.exchange), "utf-8")
    elif given.rank and given.command == "speed":
        rank_program(given.rounds, given.digest, given.out)
    elif given.rank:
        exchange_rank(given.rounds, given.out)
    else:
        run(given)


def run(given: argparse.Namespace) -> None:
    """Starts the ranks of a measurement on emulated hosts."""
    if given.out.exists():
        raise SystemExit(f"{given.out} exists; the rows of two runs are not to be mixed")
    is_speed = given.command == "speed"
    command = [sys.executable, "-m", MODULE, given.command, "--rank"]
    command += ["--rounds", str(given.rounds), "--out", str(given.out.resolve())]
    if is_speed:
        command += ["--digest", alone()]
    rate = RATE if is_speed else EXCHANGE_RATE
    with VirtualCluster(HOSTS, rate, processors=PROCESSORS if is_speed else None) as cluster:
        conditions = {**cluster.conditions(), "cpu": cpu_name(), "torch": torch.__version__}
        conditions |= {"commit": commit()[:12], "cores": os.cpu_count() or 1}
        raw_lines.append(given.out, {"kind": "conditions", **conditions})
        plugins = {PLUGINS: "benchmarks.kit.step_starts"} if is_speed else {}
        cluster.run(command, timeout_s=3600.0, environment=plugins)


if __name__ == "__main__":
    main()
