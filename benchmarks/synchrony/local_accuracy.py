"""Accuracy of local training against synchronous training after equal samples, seed by seed.

    python -m benchmarks.synchrony.local_accuracy --data DATA.pt --out ACCURACY.jsonl \\
        --seeds 1 2 3 4 5

DATA.pt is that of `benchmarks.training.end_to_end data`, and so are the network and the recipe.
Every row is one `firecaffe.train` on one worker: the number of workers changes no bit, of local
training either. What OUT has already is not trained again, so it goes on where it was interrupted.
VARIANTS are the trainings that can be asked for; which of them stands for local training was chosen
by seed 101, which is none of those that are compared. `firecaffe compare RUNS` says what it makes
of RUNS.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import firecaffe
from benchmarks.kit import raw_lines
from benchmarks.training.end_to_end_recipe import (
    BASE_LR,
    UNCOMPRESSED,
    make_network,
    make_recipe,
    open_images,
)
from firecaffe.synchrony.config import LOCAL, SynchronyConfig

REPLICAS = 4
"""One for each host of `benchmarks.synchrony.local_speed`."""

STEPS = 1500

EVERY_STEP = "every_step"


@dataclass(frozen=True)
class Variant:
    """What stands in a recipe beside the mode, its replicas and its steps."""

    words: dict[str, Any] = field(default_factory=dict)
    """Of [synchrony]."""
    compressor: str = UNCOMPRESSED
    rate: float = 1.0
    """Times the synchronous recipe's rate."""
    momentum: float = 0.9
    """Of each replica."""


VARIANTS = {
    EVERY_STEP: Variant(),
    "average": Variant(),
    "average, half the rate": Variant(rate=0.5),
    "average, after 375 synchronous steps": Variant({"warm_steps": 375}),
    "average, after 750 synchronous steps": Variant({"warm_steps": 750}),
    "average, float16, 7 beside": Variant({"overlap_steps": 7}, "float16"),
    "nesterov": Variant({"outer": "nesterov"}),
    "nesterov, a quarter of the rate": Variant({"outer": "nesterov"}, rate=0.25),
    "nesterov, no momentum in replicas": Variant({"outer": "nesterov"}, momentum=0.0),
    "nesterov, no momentum in replicas, float16, 4 beside": Variant(
        {"outer": "nesterov", "overlap_steps": 4}, "float16", momentum=0.0
    ),
    "nesterov, no momentum in replicas, int8, 2 fragments, 1 beside": Variant(
        {"outer": "nesterov", "fragments": 2, "overlap_steps": 1}, "int8", momentum=0.0
    ),
}


COMPARED = [EVERY_STEP, *list(VARIANTS)[-3:]]
"""The synchronous training, and those that stand for local training."""


def make(variant: str, seed: int, local_steps: int, folder: Path) -> firecaffe.Recipe:
    """The recipe of one training."""
    chosen = VARIANTS[variant]
    made = make_recipe(chosen.compressor, seed, STEPS, str(folder))
    made = replace(
        made, solver=replace(made.solver, base_lr=chosen.rate * BASE_LR, momentum=chosen.momentum)
    )
    if variant.startswith(EVERY_STEP):
        return made
    words = {"replicas": REPLICAS, "local_steps": local_steps, **chosen.words}
    return replace(made, synchrony=SynchronyConfig(mode=LOCAL, **words))


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=COMPARED)
    parser.add_argument("--local-steps", type=int, default=8)
    parser.add_argument("--runs", type=Path, help="keep the run folders in this one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = raw_lines.read(given.out, "accuracy") if given.out.exists() else []
    for seed in given.seeds:
        for variant in given.variants:
            key = {"variant": variant, "seed": seed, "local_steps": given.local_steps}
            if any(key.items() <= row.items() for row in done):
                continue
            with tempfile.TemporaryDirectory() as parent:
                folder = Path(given.runs or parent, f"{variant.replace(', ', '-')}-{seed}")
                row = train(variant, seed, given.local_steps, given.data, folder)
            raw_lines.append(given.out, {"kind": "accuracy", **key, **row})
            print(f"seed {seed}, {variant}: top-1 {row['top1']:.2%}", flush=True)


def train(variant: str, seed: int, local_steps: int, data: Path, folder: Path) -> dict[str, Any]:
    train_set, test_set = open_images(data)
    recipe = make(variant, seed, local_steps, folder)
    firecaffe.train(recipe, make_network, train_set=train_set, test_set=test_set)
    result = json.loads((folder / "result.json").read_text("utf-8"))
    return {word: result[word] for word in ("steps", "loss", "top1", "weights_sha256")}


if __name__ == "__main__":
    main()
