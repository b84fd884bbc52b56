"""Trains unusual networks on 1, 2 and 3 workers, takes them up again, loads them, and compares.

    python -m benchmarks.training.unusual_networks --page benchmarks/results/unusual_networks.md
    python -m benchmarks.training.unusual_networks --case "extra state"

Each has to end in the same bits on any number of workers, every tensor after every step, or in one
line that says what to do; or a line says beforehand that the bits may differ.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import firecaffe
from benchmarks.kit.paragraph import paragraph
from benchmarks.training.unusual.cases import CASES, Case
from benchmarks.training.unusual.tried import HALF, STEPS, Tried, folder_of, try_all
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.run_folder import first_difference

WORKERS = (1, 2, 3)

PAGE = """# Unusual networks

    python -m benchmarks.training.unusual_networks --page benchmarks/results/unusual_networks.md

{about}

{table}
"""

ABOUT = """Each network was trained {steps} steps on {workers} workers, and taken up again on 2 from
the checkpoint that 1 worker wrote after step {half}; then it was loaded from the run's folder.
Identical: every tensor after every step, the ends of all runs, and the outputs of the loaded
network, bit for bit. Refused: in one line, before the first step. Told: the run says beforehand
that the bits may differ. {cpu}, commit {commit}."""


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    names = options.case or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        ends = tried_on(names, Path(folder), WORKERS)
    for name, end in ends.items():
        print(f"{name:30} {'' if is_right(CASES[name], end) else 'WRONG: '}{end}")
    if options.page:
        options.page.write_text(_page(ends), encoding="utf-8")
    return int(not all(is_right(CASES[name], end) for name, end in ends.items()))


def tried_on(names: Sequence[str], folder: Path, workers: Sequence[int]) -> dict[str, str]:
    """How each case ends: "identical", "refused: LINE", "told: LINE", or what is wrong."""
    trials = {
        str(count): firecaffe.launch(
            try_all, nproc_per_node=count, args=(list(names), str(folder / str(count)))
        )
        for count in workers
    }
    begun = folder / str(workers[0])
    trials["resumed"] = firecaffe.launch(
        try_all, nproc_per_node=2, args=(list(names), str(folder / "resumed"), str(begun))
    )
    return {name: end_of(name, {on: found[name] for on, found in trials.items()}, folder)
            for name in names}  # fmt: skip


def end_of(name: str, trials: dict[str, Tried], folder: Path) -> str:
    """How a case ends, by its trials on each number of workers, and when it was taken up again."""
    first = next(iter(trials.values()))
    lines = {each.line for each in trials.values()}
    if any(lines):
        return f"refused: {first.line}" if len(lines) == 1 else f"refused differently: {lines}"
    if first.doubts:
        return f"told: {'; '.join(first.doubts)}"
    for on, trial in trials.items():
        if not trial.loads:
            return f"another network is loaded, of the run on {on}"
        if (trial.weights, trial.state) != (first.weights, first.state):
            return f"other bits at the end: {on}"
    counted = [on for on in trials if on.isdigit()]
    place = folder_of(name)
    for on in counted[1:]:
        difference = first_difference(folder / counted[0] / place, folder / on / place)
        if difference is not None:
            return f"other bits on {on} workers from step {difference.step}: {difference.tensor}"
    return "identical"


def is_right(case: Case, end: str) -> bool:
    """Whether a case ends as it has to."""
    if case.ends:
        return end.startswith("refused: ") and case.ends in end and "\n" not in end
    if case.doubted:
        return end.startswith("told: ") and case.told in end
    return end == "identical"


def _page(ends: dict[str, str]) -> str:
    rows = ["| network, loss | ends |", "| --- | --- |"]
    rows += [f"| {name} | {end.replace('|', '/')} |" for name, end in ends.items()]
    about = ABOUT.format(
        steps=STEPS,
        half=HALF,
        workers=", ".join(map(str, WORKERS)),
        cpu=cpu_name(),
        commit=commit()[:7],
    )
    return PAGE.format(about=paragraph(about), table="\n".join(rows))


if __name__ == "__main__":
    raise SystemExit(main())
