"""The networks that a recipe may name. Dropout is always `nn.Dropout`.

No layer has a backward that torch lists as nondeterministic on CUDA.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.models.alexnet import alexnet, alexnet_owt, alexnet_ungrouped, caffenet
from firecaffe.models.caffe_examples import cifar10_full, cifar10_quick, lenet, lenet_300_100
from firecaffe.models.googlenet import googlenet, googlenet_bn, googlenet_small_bn
from firecaffe.models.nin import nin, nin_cifar, nin_small
from firecaffe.models.resnet import resnet18, resnet50, resnet152
from firecaffe.models.squeezenet import squeezenet1_0, squeezenet1_1
from firecaffe.models.vgg import vgg16, vgg19, vgg_small_bn
from firecaffe.value_checks import did_you_mean

OURS = "firecaffe"


@dataclass(frozen=True)
class Model:
    """One row of MODELS.

    Args:
        build: Called as `build(num_classes=..., in_channels=...)`. Returns an initialized network.
        input_CHW: The crop that its authors train on: channels, rows and columns.
        num_classes: The number of classes of the data set that it was made for.
        source: Where it was published, as authors and year; or that it is firecaffe's own.
    """

    build: Callable[..., nn.Module]
    input_CHW: tuple[int, int, int]
    num_classes: int
    source: str


MODELS: dict[str, Model] = {
    "lenet": Model(lenet, (1, 28, 28), 10, "LeCun et al. 1998"),
    "lenet_300_100": Model(lenet_300_100, (1, 28, 28), 10, "LeCun et al. 1998"),
    "cifar10_quick": Model(cifar10_quick, (3, 32, 32), 10, "Krizhevsky, cuda-convnet"),
    "cifar10_full": Model(cifar10_full, (3, 32, 32), 10, "Krizhevsky, cuda-convnet"),
    "nin_small": Model(nin_small, (1, 28, 28), 10, OURS),
    "nin_cifar": Model(nin_cifar, (3, 32, 32), 10, "Lin et al. 2013"),
    "nin": Model(nin, (3, 224, 224), 1000, "Lin et al. 2013"),
    "alexnet": Model(alexnet, (3, 227, 227), 1000, "Krizhevsky et al. 2012"),
    "alexnet_ungrouped": Model(alexnet_ungrouped, (3, 224, 224), 1000, "Krizhevsky et al. 2012"),
    "alexnet_owt": Model(alexnet_owt, (3, 224, 224), 1000, "Krizhevsky 2014"),
    "caffenet": Model(caffenet, (3, 227, 227), 1000, "Krizhevsky et al. 2012"),
    "googlenet": Model(googlenet, (3, 224, 224), 1000, "Szegedy et al. 2014"),
    "googlenet_bn": Model(googlenet_bn, (3, 224, 224), 1000, "Ioffe and Szegedy 2015"),
    "googlenet_small_bn": Model(googlenet_small_bn, (3, 32, 32), 10, OURS),
    "vgg16": Model(vgg16, (3, 224, 224), 1000, "Simonyan and Zisserman 2014"),
    "vgg19": Model(vgg19, (3, 224, 224), 1000, "Simonyan and Zisserman 2014"),
    "vgg_small_bn": Model(vgg_small_bn, (3, 32, 32), 10, OURS),
    "squeezenet1_0": Model(squeezenet1_0, (3, 224, 224), 1000, "Iandola et al. 2016"),
    "squeezenet1_1": Model(squeezenet1_1, (3, 224, 224), 1000, "Iandola et al. 2016"),
    "resnet18": Model(resnet18, (3, 224, 224), 1000, "He et al. 2015"),
    "resnet50": Model(resnet50, (3, 224, 224), 1000, "He et al. 2015"),
    "resnet152": Model(resnet152, (3, 224, 224), 1000, "He et al. 2015"),
}
"""The networks by name."""


def build_model(
    name: str, num_classes: int | None = None, in_channels: int | None = None
) -> nn.Module:
    """Build a network, initialized as its authors do. None: the number in its row of MODELS.

    `torch.device("meta")` gives its shapes without its memory. Raises RecipeError if no network has
    that name, or a number is below 1.
    """
    check_name(name)
    return MODELS[name].build(**counts_of(name, num_classes, in_channels))


def check_name(name: str) -> None:
    if name not in MODELS:
        meant = did_you_mean(name, MODELS)
        if name.endswith(".toml"):
            meant = "; a recipe's file is no network"
        raise RecipeError(
            f"model.name: no network is called {name!r}; there are {', '.join(MODELS)}, or your "
            f"own, package.module:function or path/file.py:function{meant}"
        )


def counts_of(name: str, num_classes: int | None, in_channels: int | None) -> dict[str, int]:
    """Return the arguments of a row's function. Raises RecipeError if a number is below 1."""
    model = MODELS[name]
    counts = {
        "num_classes": model.num_classes if num_classes is None else num_classes,
        "in_channels": model.input_CHW[0] if in_channels is None else in_channels,
    }
    for field, count in counts.items():
        if count < 1:
            raise RecipeError(f"model.{field}: found {count}, must be at least 1")
    return counts
