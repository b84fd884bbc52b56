"""A small training as a process, and what it leaves: what benchmarks and tests of faults run."""

import json
import sys
from pathlib import Path

import torch
from PIL import Image

from firecaffe.data.generated import generate
from firecaffe.data.pack_images import Packing, PackOptions
from firecaffe.data.pack_sources import open_source

RECIPE = """
[model]
name = "lenet"
[data]
name = "generated"
[train]
global_batch_size = 24
micro_batch_size = 4
eval_batch_size = 500
[run]
tensorboard = false
"""
"""LeNet on generated images: no files, some 10 ms a step."""


PHOTOS = """[data]
name = "packed"
path = "{path}"
resize = 32
crop = 28
mirror = true
augment = "{augment}"
"""
"""Instead of RECIPE's data: JPEGs that are decoded while the run goes on."""


def pack_photos(folder: Path, train: int = 240, test: int = 40) -> Path:
    """Some generated images as JPEGs in shards; returns their folder."""
    sets = generate(num_train=train, num_test=test)
    for part, count in (("train", train), ("test", test)):
        images, labels = sets[part == "test"].batch(torch.arange(count))
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            path = folder / "photos" / part / str(label) / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(path, quality=95)
    options = PackOptions(shard_bytes=50_000)
    Packing(open_source(folder / "photos"), folder / "packed", options, threads=1).run()
    return folder / "packed"


def photo_recipe(packed: Path, augment: str = "caffe") -> str:
    """RECIPE on such photos."""
    return RECIPE.replace(
        '[data]\nname = "generated"\n', PHOTOS.format(path=packed, augment=augment)
    )


def command(recipe: Path, folder: Path, workers: int, *words: str) -> list[str]:
    """`firecaffe train` on so many local workers; words: of the recipe, and other options."""
    start = [sys.executable, "-m", "firecaffe", "train", str(recipe)]
    return [*start, "--nproc-per-node", str(workers), "--run.folder", str(folder), *words]


def state_of(folder: Path) -> str:
    """The digest of all that a finished run came to. Raises: OSError where it is not finished."""
    state: str = json.loads((folder / "result.json").read_text())["state_sha256"]
    return state


def steps_of(folder: Path) -> list[int]:
    """The steps that a run has recorded so far, as they stand in its file."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []
    return [row["step"] for row in rows if row["kind"] == "train"]
