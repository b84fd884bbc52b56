"""How far firecaffe's numbers are from a real Caffe's: layers, and trainings of a whole net.

    python -m benchmarks.caffe.numbers

writes benchmarks/results/caffe_numbers.md from the records in tests/golden/caffe.
"""

import argparse
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import torch

from tools.caffe_goldens.passes import FAMILIES, filled, passed
from tools.caffe_goldens.record import Record
from tools.caffe_goldens.solvers import LOOKS, TRAININGS
from tools.caffe_goldens.trained import errors_of

PAGE = Path(__file__).parents[1] / "results/caffe_numbers.md"
HEAD = """# Layers and solvers against a real Caffe

    python -m benchmarks.caffe.numbers

Each number is the norm of the difference over the norm of what Caffe has, in float32 on one thread
of a CPU (torch {torch}). Caffe is PyPI's kendryte-caffe 1.0.0.20210829; how its numbers were made
stands in tools/caffe_goldens/make.py. Its BatchNorm does not compute a batch's own statistics: in
these cases its other layers do. The net that is trained has ceil and padded pooling, groups, both
kinds of LRN, an auxiliary loss and multipliers of the rate and the decay (WHOLE in
tools/caffe_goldens/nets.py).

## Blobs and gradients, forward and backward

| family | nets | blobs and gradients | largest error | of |
|---|---|---|---|---|
"""
SOLVERS = """
## Weights of a net of {count} after 1, 3 and 12 iterations

| training | words of the solver | iter_size | 1 | 3 | 12 |
|---|---|---|---|---|---|
"""
SMALL = 1e-3
"""Norms below it are sums that come to nothing, which have no relative error."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    lines = [HEAD.format(torch=torch.__version__)]
    for family, cases in FAMILIES.items():
        found = []
        for case in cases:
            record = Record(family, case.name)
            for pair in passed(filled(case, record), case, record):
                size = np.linalg.norm(pair.caffes)
                if size > SMALL:
                    apart = np.linalg.norm(pair.ours.detach().numpy() - pair.caffes)
                    found.append((float(apart / size), f"{case.name}, {pair.what}"))
        error, where = max(found)
        lines.append(f"| {family} | {len(cases)} | {len(found)} | {error:.1e} | {where} |\n")
    count = sum(each.size for each in Record("solvers", "start").kind("start").values())
    lines.append(SOLVERS.format(count=f"{count:,} parameters"))
    for training in TRAININGS:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
            errors = errors_of(training, Path(folder))
        told = " | ".join(f"{errors[look]:.1e}" for look in LOOKS)
        lines.append(f"| {training.name} | {training.words} | {training.iter_size} | {told} |\n")
    PAGE.write_text("".join(lines))


if __name__ == "__main__":
    main()
