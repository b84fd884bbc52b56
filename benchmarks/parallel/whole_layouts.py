"""Whole networks, split in every way, over every layout of at most four workers: the same bits?

    python -m benchmarks.parallel.whole_layouts --photos FOLDER --out LAYOUTS.jsonl
    python -m benchmarks.parallel.whole_layouts --out LAYOUTS.jsonl --page

Each row trains one network at its full width on photos, 20 steps, once in each layout, and compares
every weight, buffer, optimizer state and loss after every step, as `firecaffe verify --layouts`
does. Then it trains without the split, on one worker, and says how far apart the weights end. What
OUT has already is not trained again. Exit code 1: two layouts differ.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from torch import Tensor

import firecaffe
from benchmarks.kit import raw_lines
from firecaffe import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    SolverConfig,
    TrainConfig,
)
from firecaffe.api.twins import Twin, layouts_of, train_twin
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import first_difference, read_run_file

STEPS = 20
TRAIN_IMAGES, TEST_IMAGES = 8, 1
"""Photos of a class."""

BY_MODEL = "1,data=2,data=4,model=2,model=4,model=2x2"
BY_TRICK = f"{BY_MODEL},trick=2,trick=4,trick=2x2"
OVER_TWO = "1,data=2,data=4,model=2,model=2x2"

HEAD = {"classifier.*": "neurons", "classifier.3": "inputs"}


@dataclass(frozen=True)
class Row:
    """A network and its split."""

    model: str
    crop: int
    split: dict[str, str]
    layouts: str
    parts: int = 4
    pixels: str = "photos"


ROWS = {
    "AlexNet, head": Row("alexnet", 227, HEAD, BY_TRICK),
    "AlexNet, filters": Row(
        "alexnet", 227, {"features.0": "filters", "features.8": "filters", **HEAD}, BY_MODEL
    ),
    "VGG-16, head": Row("vgg16", 224, HEAD, BY_TRICK),
    "VGG-16, rows": Row("vgg16", 224, {"features.*": "rows", **HEAD}, BY_MODEL),
    "GoogLeNet with heads, paths": Row(
        "googlenet", 224, {"inception*": "paths", "aux?.fc*": "neurons"}, BY_MODEL
    ),
    "GoogLeNet with heads, its fully connected layers": Row(
        "googlenet", 224, {"fc": "neurons", "aux?.fc*": "neurons"}, BY_TRICK
    ),
    "SqueezeNet 1.1, paths": Row(
        "squeezenet1_1", 224, {"features.[3-9]": "paths", "features.1?": "paths"}, OVER_TWO, 2
    ),
    "SqueezeNet 1.1, filters": Row(
        "squeezenet1_1", 224, {"features.0": "filters", "*.expand?x?": "filters"}, BY_MODEL
    ),
    "ResNet-18, filters": Row("resnet18", 224, {"layer*": "filters", "fc": "inputs"}, BY_MODEL),
    "LeNet, all": Row(
        "lenet",
        28,
        {"conv1": "filters", "conv2": "channels", "ip1": "neurons", "ip2": "inputs"},
        BY_MODEL,
        pixels="generated",
    ),
    "LeNet, head": Row("lenet", 28, {"ip1": "neurons", "ip2": "inputs"}, BY_TRICK, 4, "generated"),
    "NiN, filters and channels": Row(
        "nin_small",
        28,
        {"conv1": "filters", "cccp1": "channels", "conv2": "filters", "cccp3": "channels"},
        BY_MODEL,
        pixels="generated",
    ),
}


def recipe(row: Row, photos: Path) -> Recipe:
    """Two micro-batches a worker, of one photo, or of four small images."""
    if row.pixels == "photos":
        data = DataConfig("folder", path=str(photos), resize=256, crop=row.crop, mirror=True)
        train = TrainConfig(4, 1, steps=STEPS, device="cpu", eval_batch_size=1)
    else:
        data = DataConfig("generated")
        train = TrainConfig(32, 4, steps=STEPS, device="cpu", eval_batch_size=1000)
    return Recipe(
        model=ModelConfig(row.model),
        data=data,
        train=train,
        solver=SolverConfig(base_lr=0.001, momentum=0.9, weight_decay=5e-4),
        parallel=ParallelConfig(split=row.split, parts=row.parts),
    )


def measure(name: str, photos: Path) -> dict[str, object]:
    """One row, as a raw line has it."""
    row, begun_s = ROWS[name], perf_counter()
    made = recipe(row, photos)
    unsplit = Twin("unsplit", 1, check_recipe(dataclasses.replace(made, parallel=ParallelConfig())))
    with TemporaryDirectory(prefix="firecaffe-layouts-") as parent:
        folder = Path(parent)
        first, *others = layouts_of(row.layouts, made)
        base = train_twin(first, folder, digests=True)
        result = read_run_file(base, "result.json")
        split_weights = weights_of(base)
        apart = distance(split_weights, weights_of(train_twin(unsplit, folder)))
        differs = ""
        for twin in others:
            run = train_twin(twin, folder, digests=True)
            difference = first_difference(base, run)
            if difference is not None:
                differs = f"{twin.name} from step {difference.step}, in {difference.tensor}"
                break
    return {
        "row": name,
        "layouts": [first.name, *(twin.name for twin in others)],
        "parts": row.parts,
        "parameters": sum(each.numel() for each in split_weights.values()),
        "differs": differs,
        "state_sha256": result["state_sha256"],
        "apart": apart,
        "seconds": perf_counter() - begun_s,
    }


def weights_of(run: Path) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in firecaffe.load(run).named_parameters()}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights, relative to that of theirs."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in ours)
    whole = sum(float(each.double().square().sum()) for each in theirs.values())
    return float((apart / whole) ** 0.5)


def choose_photos(given: Path, to: Path) -> Path:
    """A folder with links to the first photos of each class."""
    for part, count in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        for of_class in sorted(each for each in (given / part).iterdir() if each.is_dir()):
            chosen = to / part / of_class.name
            chosen.mkdir(parents=True)
            for photo in sorted(of_class.iterdir())[:count]:
                os.symlink(photo.resolve(), chosen / photo.name)
    return to


def page(out: Path) -> str:
    """A row for each network and split."""
    lines = [
        "| network, split | weights | parts | layouts | after each of "
        f"{STEPS} steps | state | to the unsplit network |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in raw_lines.read(out, "row"):
        verdict = row["differs"] or "identical"
        lines.append(
            f"| {row['row']} | {row['parameters']:,} | {row['parts']} | "
            f"{', '.join(row['layouts'])} | {verdict} | {row['state_sha256'][:12]} | "
            f"{row['apart']:.1e} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--photos", type=Path, help="a folder with train/CLASS and test/CLASS")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--page", action="store_true", help="print the table of what OUT has")
    given = parser.parse_args(arguments)
    if given.page:
        print(page(given.out))
        return
    if given.photos is None:
        parser.error("--photos FOLDER is needed to train")
    raw_lines.begin(given.out)
    with TemporaryDirectory(prefix="firecaffe-photos-") as folder:
        photos = choose_photos(given.photos, Path(folder))
        for name in given.rows:
            if not raw_lines.read(given.out, "row", row=name):
                raw_lines.append(given.out, {"kind": "row", **measure(name, photos)})
    if any(row["differs"] for row in raw_lines.read(given.out, "row")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
