"""Networks made small by `firecaffe compress`, over seeds: bytes, and accuracy of the decoded file.

    python -m benchmarks.compression.compressed_networks --out SMALL.jsonl --runs FOLDER \\
        --seeds 1 2 3 4 5
    python -m benchmarks.compression.compressed_networks --out SMALL.jsonl --page

benchmarks/compressed/NETWORK/float.toml is the recipe of the network as it is; other files
there are schemes, each named by what it is to reach. Every seed trains the network anew, and each
scheme begins with what that seed has come to, so differences are of pairs. A ratio is 4 bytes a
weight over the whole file. What OUT has already is not trained again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean

from benchmarks.kit import raw_lines
from firecaffe.runs.statistics import mean_of

FOLDER = Path(__file__).parents[1] / "compressed"
FLOAT = "float"
BYTES_PER_WEIGHT = 4


def networks() -> list[str]:
    return sorted(each.name for each in FOLDER.iterdir() if each.is_dir())


def schemes(network: str) -> list[str]:
    """In the order of their names; without the recipe."""
    return sorted(each.stem for each in (FOLDER / network).glob("*.toml") if each.stem != FLOAT)


def measure(network: str, seed: int, wanted: Sequence[str], runs: Path, out: Path) -> None:
    """Trains the network, then makes it small by each scheme; a row for each."""
    left = [
        scheme
        for scheme in wanted
        if not raw_lines.read(out, "file", network=network, seed=seed, scheme=scheme)
    ]
    if not left:
        return
    run = runs / f"{network}-{seed}"
    if not (run / "result.json").exists():
        recipe = FOLDER / network / f"{FLOAT}.toml"
        firecaffe("train", recipe, "--train.seed", seed, "--run.folder", run)
    for scheme in left:
        path = runs / f"{network}-{seed}-{scheme}.fcz"
        words = ["--scheme", FOLDER / network / f"{scheme}.toml", "--out", path]
        firecaffe("compress", run, *words)
        found = json.loads((path.with_name(f"{path.stem}-rounds") / "net.json").read_text())
        row = {"network": network, "seed": seed, "scheme": scheme, **found}
        raw_lines.append(out, {"kind": "file", **row})
        print(row, file=sys.stderr, flush=True)


def firecaffe(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "firecaffe", *map(str, words)], check=True)


def page(out: Path) -> str:
    """A row for each network and scheme."""
    lines = [
        "| network | scheme | n | bytes, mean | ratio | as it was, % | decoded file, % | "
        "lost, points (95 %) | least to most |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = raw_lines.read(out, "file")
    for network, scheme in dict.fromkeys((row["network"], row["scheme"]) for row in rows):
        own = [row for row in rows if (row["network"], row["scheme"]) == (network, scheme)]
        lost = [row["lost"]["test"] for row in own]
        after = [100 * row["decoded"]["test"] for row in own]
        before = [each + less for each, less in zip(after, lost, strict=True)]
        found = mean_of(lost)
        low, high = found.value - found.half, found.value + found.half
        interval = f" ({low:+.2f} to {high:+.2f})" if isfinite(found.half) else ""
        lines.append(
            f"| {network} | {scheme} | {len(own)} | {mean(row['bytes'] for row in own):,.0f} | "
            f"{mean(row['ratio'] for row in own):.1f} | {mean(before):.2f} | {mean(after):.2f} | "
            f"{found.value:+.2f}{interval} | {min(lost):+.2f} to {max(lost):+.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--runs", type=Path, help="a folder for the trainings and files")
    parser.add_argument("--networks", nargs="+", default=networks(), choices=networks())
    parser.add_argument("--schemes", nargs="+", help="of each network; all if left out")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--page", action="store_true", help="print the table of what OUT has")
    given = parser.parse_args()
    if not given.page:
        if given.runs is None:
            parser.error("--runs is missing: a folder for the trainings and files")
        raw_lines.begin(given.out)
        for network in given.networks:
            for seed in given.seeds:
                own = [each for each in schemes(network) if each in (given.schemes or [each])]
                measure(network, seed, own, given.runs, given.out)
    print(page(given.out))


if __name__ == "__main__":
    main()
