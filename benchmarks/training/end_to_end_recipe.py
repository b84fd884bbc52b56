"""What both parts of the end-to-end benchmark train: the recipe, its variants, and the images."""

import io
import tarfile
from pathlib import Path, PurePosixPath

import torch
from PIL import Image
from torch import Tensor, nn

from firecaffe.caffe import fillers
from firecaffe.data import DataConfig, TensorDataset
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.config import NO_COMPRESSOR, ExchangeConfig
from firecaffe.models import build_model
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.runs.run_folder import RunConfig
from firecaffe.solvers.config import SolverConfig

HOSTS = 4

UNCOMPRESSED = NO_COMPRESSOR
DDP = "ddp"
ALONE = "ddp, no exchange"
"""DDP's own way to leave the exchange out: what a step takes without communication."""

RING = "none, by ring"
"""Uncompressed, not in tree order: the exchange that DDP has."""

OURS = (UNCOMPRESSED, *COMPRESSORS)

SIDE = 16
"""Pixels: CIFAR-10's 32, halved. The same weights then take a quarter of the time, which leaves
hosts that share two cores with more of the step for communication."""

GLOBAL_BATCH_SIZE = 32
MICRO_BATCH_SIZE = 8
LEVEL = 0
"""Of the micro-batch tree: there it has as many nodes as there are hosts."""

MEAN, STD = [0.491, 0.482, 0.447], [0.247, 0.243, 0.262]
"""Of CIFAR-10's training images."""

BASE_LR = 0.02


def make_network() -> nn.Module:
    """nin_cifar with what nin_small changes of it to learn within an epoch: He's filler, one
    dropout, no ReLU on the logits. The weights are as many.
    """
    network = build_model("nin_cifar", num_classes=10, in_channels=3)
    for name in ("drop1", "relu_cccp6"):
        network.set_submodule(name, nn.Identity())
    fillers.fill_all(network, fillers.msra)
    return network


def make_recipe(variant: str, seed: int, steps: int, folder: str = "") -> Recipe:
    """variant: a compressor, UNCOMPRESSED or RING. folder: of the run."""
    return Recipe(
        data=DataConfig(pad=SIDE // 8, crop=SIDE, mirror=True, mean=MEAN, std=STD),
        train=TrainConfig(
            global_batch_size=GLOBAL_BATCH_SIZE,
            micro_batch_size=MICRO_BATCH_SIZE,
            steps=steps,
            seed=seed,
            device="cpu",
        ),
        solver=SolverConfig(
            type="sgd",
            base_lr=BASE_LR,
            lr_policy="poly",
            power=1.0,
            warmup_steps=steps // 20,
            momentum=0.9,
            weight_decay=1e-4,
        ),
        exchange=ExchangeConfig(
            algorithm="ring" if variant == RING else "halving_doubling",
            compressor=UNCOMPRESSED if variant == RING else variant,
            compressor_level=LEVEL,
        ),
        run=RunConfig(folder=folder, tensorboard=False),
    )


def convert(archive: Path, to: Path) -> None:
    """Decodes an archive of train/CLASS/*.jpg and test/CLASS/*.jpg once, to uint8 tensors.

    Samples are in the order in which `firecaffe.data.image_folder` numbers them.
    """
    images: dict[str, list[tuple[str, str, Tensor]]] = {"train": [], "test": []}
    with tarfile.open(archive) as files:
        for member in files:
            path = PurePosixPath(member.name)
            content = files.extractfile(member) if path.suffix == ".jpg" else None
            if content is None:
                continue
            part, class_name, file = path.parts[-3:]
            with Image.open(io.BytesIO(content.read())) as image:
                resized = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
            pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
            tensor = pixels.view(SIDE, SIDE, 3)
            images[part].append((class_name, file, tensor.permute(2, 0, 1)))
    whole: dict[str, Tensor] = {}
    for part, samples in images.items():
        samples.sort(key=lambda sample: sample[:2])
        names = sorted({name for name, _, _ in samples})
        whole[f"{part}_images"] = torch.stack([image for _, _, image in samples])
        whole[f"{part}_labels"] = torch.tensor([names.index(name) for name, _, _ in samples])
    to.parent.mkdir(parents=True, exist_ok=True)
    torch.save(whole, to)


def open_images(path: Path, num_test: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """What `convert` wrote; ranks of one machine share its pages. num_test: the first so many."""
    whole = torch.load(path, mmap=True)
    train, test = ((whole[f"{part}_images"], whole[f"{part}_labels"]) for part in ("train", "test"))
    return TensorDataset(*train, 10), TensorDataset(test[0][:num_test], test[1][:num_test], 10)
