"""Memory of a worker: the planner's forecast beside the peak of trainings on a CPU.

    python -m benchmarks.planner.memory --out MEMORY.jsonl
    python -m benchmarks.planner.memory --out MEMORY.jsonl --page benchmarks/results/memory.md

Each training has fresh processes and made-up images. Its measured memory is the largest resident
memory of a rank, less the median of a network of almost nothing on as many ranks (`BASE`), which
holds libraries, the process group and the data. The forecast is the planner's without "library".
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from torch import nn

from benchmarks.kit import raw_lines
from benchmarks.kit.made_up_images import EVALUATED
from firecaffe import DataConfig, ModelConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.api.twins import Twin, train_twin
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.memory import memory_bytes, on_device
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import CheckedRecipe, check_recipe
from firecaffe.runs.run_folder import read_run_file

STEPS = 3


@dataclass(frozen=True)
class Case:
    model: str
    size: int
    """Rows and columns of an image."""
    micro_batch: int
    solver: str = "sgd"
    workers: int = 1
    share: int = 1
    """Micro-batches of a worker."""

    def recipe(self) -> CheckedRecipe:
        batch = self.micro_batch * self.share * self.workers
        name, _, args = self.model.partition(" ")
        given = {"width": 192, "depth": 6, "patch": 16} if args else {}
        return check_recipe(
            Recipe(
                model=ModelConfig(name, args=given),
                data=DataConfig(
                    "benchmarks.kit.made_up_images:images",
                    args={"count": batch, "size": self.size},
                    augment="none",
                ),
                train=TrainConfig(
                    batch, self.micro_batch, steps=STEPS, device="cpu", eval_batch_size=EVALUATED
                ),
                solver=SolverConfig(self.solver, base_lr=1e-5),
            )
        )

    def peak_bytes(self) -> int:
        """Train; return the largest resident memory of a rank."""
        with TemporaryDirectory(prefix="firecaffe-memory-") as parent:
            run = train_twin(Twin(str(self.workers), self.workers, self.recipe()), Path(parent))
            return int(max(read_run_file(run, "result.json")["peak_memory_bytes_by_rank"]))


def tiny(num_classes: int, in_channels: int) -> nn.Module:
    """A network of all kinds of kernels, and almost no weights."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, 4),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )


BASE = "benchmarks.planner.memory:tiny"
SIZES = {
    "lenet": (28, 256, 1024),
    "nin_cifar": (32, 32, 64),
    "vgg_small_bn": (32, 32, 64),
    "resnet18": (224, 4, 8),
    "squeezenet1_1": (224, 4, 8),
    "alexnet": (227, 4, 16),
    "googlenet": (224, 4, 8),
    "benchmarks.planner.device_transformers:vit 192x6": (224, 4, 8),
}
"""Of each network the size of its images, and two micro-batches."""


def cases() -> Iterator[Case]:
    for workers in (1, 2):
        yield Case(BASE, 32, EVALUATED, workers=workers)
    for model, (size, small, large) in SIZES.items():
        yield Case(model, size, small)
        yield Case(model, size, large, "adam", workers=2, share=2)
        yield Case(model, size, large)


def measure(out: Path, repeats: int) -> None:
    """Measure what the file lacks, all cases once before the first one's second time."""
    raw_lines.begin(out)
    for repeat in range(repeats):
        for case in cases():
            if len(raw_lines.read(out, "run", **asdict(case))) <= repeat:
                row = asdict(case) | {"peak_bytes": case.peak_bytes()}
                raw_lines.append(out, {"kind": "run", **row})


PARTS = ("activations", "backward", "allocator", "evaluating", "saving", "updating")


def page(out: Path) -> str:
    """A row for each case, and the errors of all."""
    rows = raw_lines.read(out, "run")
    peaks = {
        case: [r["peak_bytes"] for r in rows if asdict(case).items() <= r.items()]
        for case in cases()
    }
    base = {case.workers: median(peaks[case]) for case in cases() if case.model == BASE}
    device = load_cluster("cpu-host").device
    lines = [
        "| network | micro-batch | solver | workers | n | forecast, MB | measured, median, MB | "
        f"least to most | ratio | weights, gradients, optimizer | {' | '.join(PARTS)} |",
        "|---" * (10 + len(PARTS)) + "|",
    ]
    ratios = []
    for case in (case for case in cases() if case.model != BASE):
        counted = memory_bytes(workload_of(case.recipe()), case.workers, in_memory=case.workers)
        parts = on_device(counted, device)
        parts.pop("library")
        used = [peak - base[case.workers] for peak in peaks[case]]
        ratios.append(sum(parts.values()) / median(used))
        others = sum(size for name, size in parts.items() if name not in PARTS)
        lines.append(
            f"| {case.model.rpartition(':')[2]} | {case.micro_batch} | {case.solver} | "
            f"{case.workers} | {len(used)} | {sum(parts.values()) / 1e6:,.0f} | "
            f"{median(used) / 1e6:,.0f} | {min(used) / 1e6:,.0f} to {max(used) / 1e6:,.0f} | "
            f"{ratios[-1]:.2f} | {others / 1e6:,.0f} | "
            + " | ".join(f"{parts[name] / 1e6:,.0f}" for name in PARTS)
            + " |"
        )
    errors = [abs(ratio - 1) for ratio in ratios]
    [conditions] = raw_lines.read(out, "conditions")
    return "\n".join(
        [
            "# Memory of a worker, forecast and measured",
            "",
            "Written by `python -m benchmarks.planner.memory --out MEMORY.jsonl --page …` on "
            f"{conditions['cpu']}, torch {conditions['torch']}. Largest resident memory of a rank, "
            "less a tiny network's "
            f"({base[1] / 1e6:,.0f} MB). With two workers, each has two micro-batches.",
            "",
            f"Ratios {min(ratios):.2f} to {max(ratios):.2f}; error: median {median(errors):.1%}; "
            f"{sum(error <= 0.1 for error in errors)} of {len(errors)} within 10 %. One number is "
            "fitted to the rows of one worker: `planner.memory.SLACK`.",
            "",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=Path, help="write the table of what OUT has")
    given = parser.parse_args()
    if given.page:
        given.page.write_text(page(given.out), encoding="utf-8")
        return
    measure(given.out, given.repeats)


if __name__ == "__main__":
    main()
