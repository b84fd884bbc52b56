"""Caffe's own examples, imported as they are and trained: top-1 beside a real Caffe's.

    python -m benchmarks.caffe.training CAFFE --runs FOLDER --out ROWS.jsonl --examples lenet

CAFFE is a clone of BVLC/caffe, of which the prototxts of examples/mnist and examples/cifar10 are
read. The images go into LMDBs in FOLDER, where the prototxts name them: Fashion-MNIST for LeNet,
CIFAR-10 for cifar10_quick, whose mean image is made of the training images. The solver's words are
its own but for the iterations. What ROWS.jsonl has already is not trained again; the page is
benchmarks/results/caffe.md.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import lmdb
import torch
from torch import Tensor

from benchmarks.kit import raw_lines
from firecaffe.caffe import binary
from firecaffe.data import DataConfig, open_data


@dataclass(frozen=True)
class Example:
    """One of Caffe's examples."""

    solver: str
    """Its path in Caffe's repository."""
    data: str
    """The data set, as a recipe names it."""
    lmdbs: tuple[str, str]
    """Of training and test."""
    mean_file: str
    iterations: int
    eval_every: int


EXAMPLES = {
    "lenet": Example(
        "examples/mnist/lenet_solver.prototxt",
        "fashion-mnist",
        ("examples/mnist/mnist_train_lmdb", "examples/mnist/mnist_test_lmdb"),
        "",
        5000,
        5000,
    ),
    "cifar10_quick": Example(
        "examples/cifar10/cifar10_quick_solver.prototxt",
        "cifar10",
        ("examples/cifar10/cifar10_train_lmdb", "examples/cifar10/cifar10_test_lmdb"),
        "examples/cifar10/mean.binaryproto",
        3000,
        1000,
    ),
}

CHANNELS, HEIGHT, WIDTH, DATA, LABEL = 1, 2, 3, 4, 5
"""Fields of a Datum."""


def write_lmdb(path: Path, images_BCHW: Tensor, labels_B: Tensor) -> None:
    """Raw Datums under rising keys; colors in Caffe's order, blue first."""
    path.mkdir(parents=True)
    room = 2 * images_BCHW.numel() + (1 << 24)
    with lmdb.open(str(path), map_size=room) as base, base.begin(write=True) as view:
        for place, (image, label) in enumerate(zip(images_BCHW, labels_B.tolist(), strict=True)):
            sizes = dict(zip((CHANNELS, HEIGHT, WIDTH), image.shape, strict=True))
            words = [part for number, size in sizes.items() for part in binary.field(number, size)]
            words += binary.field(DATA, image.flip(0).contiguous().numpy().tobytes())
            words += binary.field(LABEL, label)
            view.put(f"{place:08d}".encode(), b"".join(map(bytes, words)))


def prepare(example: Example, root: Path) -> None:
    """The data where the prototxts name them."""
    if (root / example.lmdbs[1]).exists():
        return
    data = open_data(DataConfig(example.data, augment="none"))
    for name, part in zip(example.lmdbs, (data.train, data.test), strict=True):
        images, labels = part.batch(torch.arange(len(part)))[:2]
        if example.mean_file and name == example.lmdbs[0]:
            average = images.float().mean(0).flip(0).numpy()
            (root / example.mean_file).parent.mkdir(parents=True, exist_ok=True)
            binary.write_mean(root / example.mean_file, average)
        write_lmdb(root / name, images, labels)


def measure(name: str, caffe: Path, runs: Path, seed: int, out: Path) -> None:
    """Imports and trains; a row."""
    example = EXAMPLES[name]
    folder = runs / name
    if not (folder / "recipe.toml").exists():
        root = runs / "caffe"
        prepare(example, root)
        place = (root / example.solver).parent
        for file in (caffe / example.solver).parent.glob("*.prototxt"):
            shutil.copyfile(file, place / file.name)
        firecaffe("import", root / example.solver, "--out", folder)
    run = runs / f"{name}-{seed}"
    if not (run / "result.json").exists():
        firecaffe(
            *("train", folder / "recipe.toml", "--run.folder", run, "--train.seed", seed),
            *("--train.steps", example.iterations, "--train.eval_every", example.eval_every),
            *("--nproc-per-node", 1, "--checkpoint.every", 0),
        )
    result = json.loads((run / "result.json").read_text())
    raw_lines.append(out, {"kind": "trained", "example": name, "seed": seed, **kept(result, run)})


def kept(result: dict[str, object], run: Path) -> dict[str, object]:
    """What a row has of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    on_the_way = [row for row in rows if row.get("kind") == "validation"]
    return {"metrics": result["metrics"], "on_the_way": on_the_way}


def firecaffe(*words: object) -> None:
    command = [sys.executable, "-m", "firecaffe", *map(str, words)]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("caffe", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=[*EXAMPLES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    given = parser.parse_args()
    raw_lines.begin(given.out)
    for name in given.examples:
        for seed in given.seeds:
            if not raw_lines.read(given.out, "trained", example=name, seed=seed):
                measure(name, given.caffe, given.runs, seed, given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
