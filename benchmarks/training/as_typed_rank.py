"""What a rank of `as_typed` does: the command as it is typed, or the DDP script."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.kit import step_starts
from benchmarks.training import as_typed_ddp
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.cli import main
from firecaffe.data import Batches, SampleOrder, TensorDataset
from firecaffe.data.generated import generate
from firecaffe.models import build_model

RECIPE = Path(__file__).parents[2] / "recipes" / "nin_cifar.toml"


def images() -> tuple[TensorDataset, TensorDataset]:
    """Made-up images of CIFAR's form, no more than are trained on."""
    train, test = generate(0, num_train=2048, num_test=64)
    return _of_cifar(train), _of_cifar(test)


def _of_cifar(gray: TensorDataset) -> TensorDataset:
    whole = torch.nn.functional.pad(gray.inputs, (2, 2, 2, 2)).repeat(1, 3, 1, 1)
    return TensorDataset(whole, gray.targets, 10)


def ours(words: Sequence[str], steps: int, out: Path) -> int:
    """Trains so many steps; rank 0 writes when each began."""
    short = f"--data.name={__name__}:images", f"--train.steps={steps}"
    code = main(["train", str(RECIPE), *short, *words])
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps({"starts": step_starts.STARTS}), encoding="utf-8")
    return code


def ddp(check: bool, steps: int, out: Path) -> int:
    """The same by the script. check: see there."""
    recipe = recipe_of(RECIPE)
    train, data = recipe.train, images()[0]
    order = SampleOrder(train.seed, len(data), train.global_batch_size, train.micro_batch_size)
    batches = Batches(data, order, recipe.data)
    whole = list[as_typed_ddp.Batch]()
    for step in range(steps):
        parts = [batches.train_batch(step, leaf) for leaf in range(train.num_micro_batches)]
        inputs, labels = zip(*parts, strict=True)
        whole.append((torch.cat(inputs), torch.cat(labels)))
    torch.manual_seed(train.seed)
    return as_typed_ddp.train(build_model(recipe.model.name), whole, check, out)
