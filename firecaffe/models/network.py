"""The network that a recipe names: a row of MODELS, or what someone else's function returns."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.generators import generators_kept
from firecaffe.meta_kernels import on_meta
from firecaffe.models.config import ModelConfig
from firecaffe.models.freeze import freeze
from firecaffe.models.low_rank import make_low_rank
from firecaffe.models.table import MODELS, check_name, counts_of
from firecaffe.reference import (
    CAFFE,
    caffe_file,
    call,
    check_trusted,
    file_digest,
    find,
    is_reference,
    shown,
    source_digest,
)

T = TypeVar("T")

WORD = "model.name"
GIVEN_IN_PYTHON = "own "
"""What the name of a network begins with that was given to `firecaffe.train`."""


_given: ContextVar[Callable[[], Any] | None] = ContextVar("given", default=None)


@contextmanager
def given_network(make: Callable[[], Any] | None) -> Iterator[None]:
    """Lets a recipe's name stand for a network that was given in Python, for a `with` block that
    looks at it: each time a copy, for what `make` returns may be the very one that is trained.
    """
    token = _given.set(make)
    try:
        yield
    finally:
        _given.reset(token)


def _copy_of(make: Callable[[], Any]) -> Any:
    # Never on the meta device: it may keep what it makes.
    with generators_kept(), torch.device("cpu"):
        return deepcopy(make())


@dataclass(frozen=True)
class Maker:
    """A function that makes a network, and what it is told of the data."""

    function: Callable[..., Any]
    num_classes: str
    """Its parameter for the number of classes; empty if it takes none."""
    in_channels: str
    code: str
    """What tells its code from other code; empty if it is firecaffe's own."""


def make_network(
    config: ModelConfig, num_classes: int | None = None, in_channels: int | None = None
) -> nn.Module:
    """The network with fresh weights, of lower rank as `model.low_rank` says; parameters that
    `model.freeze` names are frozen.

    num_classes, in_channels: what the data say; they are handed over unless `model.args` has them.

    Raises: RecipeError; OwnCodeError for what a user's code raises.
    """
    maker = maker_of(config.name)
    handed = {maker.num_classes: num_classes, maker.in_channels: in_channels}
    if config.name in MODELS:
        handed = {**counts_of(config.name, num_classes, in_channels)}
    known = {word: count for word, count in handed.items() if word and count is not None}
    made = call(WORD, config.name, maker.function, {**known, **config.args})
    network = check_made(f"{WORD} {config.name!r}", made)
    make_low_rank(network, config.low_rank)
    freeze(network, config.freeze)
    return network


def check_made(what: str, made: Any) -> nn.Module:
    """What a function returned. Raises: RecipeError if it is no network."""
    if not isinstance(made, nn.Module):
        raise RecipeError(f"{what} returned {shown(made)}; expected a network, a torch.nn.Module")
    for name, parameter in made.named_parameters():
        if is_lazy(parameter):
            raise RecipeError(
                f"{what} returned a network whose {name} has no shape yet (a Lazy layer of torch); "
                "give its size, so that the first weights are the seed's"
            )
    return made


def with_outline(
    config: ModelConfig,
    num_classes: int | None,
    in_channels: int | None,
    use: Callable[[nn.Module], T],
) -> T:
    """What `use` finds out of the network on the meta device, where it takes no memory. If someone
    else's code needs numbers, of a network in memory; networks of ours never do.

    Raises: RecipeError; OwnCodeError, which `use` has to raise too of a user's code.
    """
    try:
        with on_meta():
            network = make_network(config, num_classes, in_channels)
        if all(each.is_meta for each in (*network.parameters(), *network.buffers())):
            return use(network)
    except OwnCodeError:
        if config.name in MODELS:
            raise
        # it may be for the numbers alone, and is raised again if it is not
    with generators_kept():
        return use(make_network(config, num_classes, in_channels))


def maker_of(name: str) -> Maker:
    """Raises: RecipeError if there is none; OwnCodeError if its module fails."""
    check_trusted(WORD, name)  # a library's networks, too, may be told to load a pickle
    library, _, member = name.partition(":")
    if library in LIBRARIES and member:
        return LIBRARIES[library](member)
    if is_reference(name):
        function = find(WORD, name)
        taken = _parameters(function)
        num_classes, in_channels = (
            word if word in taken else "" for word in ("num_classes", "in_channels")
        )
        return Maker(function, num_classes, in_channels, source_digest(function))
    if name.startswith(GIVEN_IN_PYTHON):
        if (given := _given.get()) is not None:
            return Maker(partial(_copy_of, given), "", "", source_digest(given))
        raise RecipeError(
            f"{WORD} is {name!r}: that run's network was given in Python (firecaffe.train(recipe, "
            f"model=…)); start its script again, or say where the function is: {WORD} = "
            '"path/file.py:function"'
        )
    check_name(name)
    return Maker(MODELS[name].build, "num_classes", "in_channels", "")


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a builtin without one
        return ()


def _timm(name: str) -> Maker:
    timm = _installed("timm")
    if not timm.is_model(name.partition(".")[0]):
        raise _unknown("timm", name, timm.list_models())
    made = partial(timm.create_model, name)
    return Maker(made, "num_classes", "in_chans", f"timm {timm.__version__}")


def _torchvision(name: str) -> Maker:
    torchvision = _installed("torchvision")
    models = import_module("torchvision.models")
    if name not in models.list_models():
        raise _unknown("torchvision", name, models.list_models())
    made = partial(models.get_model, name)
    return Maker(made, "num_classes", "", f"torchvision {torchvision.__version__}")


def _caffe(name: str) -> Maker:
    from firecaffe.caffe.trained import Trained  # for those who have such a network

    path = caffe_file(WORD, CAFFE + name)
    return Maker(partial(Trained, str(path)), "", "", file_digest(path))


LIBRARIES: dict[str, Callable[[str], Maker]] = {
    "caffe": _caffe,
    "timm": _timm,
    "torchvision": _torchvision,
}
"""What a recipe may name networks by: caffe:PATH, a prototxt; timm:NAME, torchvision:NAME, where
these are installed."""


def _installed(library: str) -> Any:
    try:
        return import_module(library)
    except (ImportError, OSError, RuntimeError) as error:  # what one of another torch's raises
        said = " ".join(str(error).split())
        raise RecipeError(
            f"{WORD} is one of {library}'s networks, and {library} cannot be imported ({said}); "
            f"pip install {library}, for torch {torch.__version__}"
        ) from error


def _unknown(library: str, name: str, known: list[str]) -> RecipeError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {library}:{close[0]}?" if close else ""
    return RecipeError(f"{WORD}: {library} has no network called {name!r}{hint}")
