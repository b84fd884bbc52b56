"""The network that a recipe names: a row of MODELS, or one that a user's function returns.

Parameters that are not trained are frozen by patterns in the recipe, or by the network itself.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.files import sha256_of
from firecaffe.generators import generators_kept
from firecaffe.meta_kernels import on_meta
from firecaffe.models import ModelConfig
from firecaffe.models.known_networks import MODELS, check_name, counts_of
from firecaffe.models.low_rank import make_low_rank
from firecaffe.models.weights import FirstWeights
from firecaffe.user_code import (
    CAFFE,
    caffe_file,
    call,
    check_trusted,
    failing_as,
    find,
    is_reference,
    shown,
    source_digest,
)
from firecaffe.value_checks import did_you_mean

T = TypeVar("T")

WORD = "model.name"
GIVEN_IN_PYTHON = "own "
"""Prefix of the name of a network that was passed to `firecaffe.train`."""


_given: ContextVar[Callable[[], Any] | None] = ContextVar("given", default=None)


@contextmanager
def given_network(make: Callable[[], Any] | None) -> Iterator[None]:
    """Let a recipe's name stand for a network passed in Python, within a `with` block."""
    token = _given.set(make)
    try:
        yield
    finally:
        _given.reset(token)


def _copy_of(make: Callable[[], Any]) -> Any:
    # A copy, since `make` may return the network that is trained. Never on the meta device, since
    # `make` may keep the network.
    with generators_kept(), torch.device("cpu"):
        return deepcopy(make())


@dataclass(frozen=True)
class Maker:
    function: Callable[..., Any]
    num_classes: str
    """Name of the function's parameter for the number of classes, or empty."""
    in_channels: str
    code: str
    """Digest or version of the code. Empty for firecaffe's networks."""


def make_network(
    config: ModelConfig, num_classes: int | None = None, in_channels: int | None = None
) -> nn.Module:
    """Make the network, fresh, low-rank and frozen as asked. Raises RecipeError, OwnCodeError."""
    maker = maker_of(config.name)
    handed = {maker.num_classes: num_classes, maker.in_channels: in_channels}
    if config.name in MODELS:
        handed = {**counts_of(config.name, num_classes, in_channels)}
    known = {word: count for word, count in handed.items() if word and count is not None}
    try:
        made = call(WORD, config.name, maker.function, {**known, **config.args})
    except OwnCodeError as error:
        if config.name not in MODELS or not config.args:
            raise
        words = ", ".join(f"{word}={shown(value)}" for word, value in config.args.items())
        raised = str(error).partition(" raised ")[2]
        raise RecipeError(
            f"model.args of {config.name} are {words}, of which it cannot be made ({raised}); give "
            "others"
        ) from error
    network = check_made(f"{WORD} {config.name!r}", made)
    make_low_rank(network, config.low_rank)
    freeze(network, config.freeze)
    return network


def check_made(what: str, made: Any) -> nn.Module:
    """Return `made`. Raises RecipeError if it is not a network, or has lazy layers."""
    if not isinstance(made, nn.Module):
        raise RecipeError(f"{what} returned {shown(made)}; expected a network, a torch.nn.Module")
    for name, parameter in made.named_parameters():
        if is_lazy(parameter):
            raise RecipeError(
                f"{what} returned a network whose {name} has no shape yet (a Lazy layer of torch); "
                "give its size, so that the first weights are the seed's"
            )
    return made


def made_by(model: Callable[[], Any]) -> nn.Module:
    """Call a user's function. Raises as `check_made`, or OwnCodeError for the function's errors."""
    with failing_as("model()"):
        made = model()
    return check_made("model()", made)


def with_outline(
    config: ModelConfig,
    num_classes: int | None,
    in_channels: int | None,
    use: Callable[[nn.Module], T],
) -> T:
    """Call `use` with the network on the meta device, or in memory if a user's code needs values.

    Raises RecipeError or OwnCodeError; `use` must raise OwnCodeError if a user's code fails.
    """
    maker_of(config.name)  # imports a user's file, whose tensors must not be on meta
    try:
        with on_meta():
            network = make_network(config, num_classes, in_channels)
        if all(parameter.is_meta for parameter in (*network.parameters(), *network.buffers())):
            return use(network)
    except OwnCodeError:
        if config.name in MODELS:
            raise
        # The cause may be only the lack of values. If not, the error is raised again below.
    with generators_kept():
        return use(make_network(config, num_classes, in_channels))


def maker_of(name: str) -> Maker:
    """Return the maker of a name. Raises RecipeError if unknown, OwnCodeError if code fails."""
    check_trusted(WORD, name)  # a library's network may load a pickle, too
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
    except ValueError:  # a builtin without a signature
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
    from firecaffe.caffe.trained import TrainedNet  # imported only if it is used

    path = caffe_file(WORD, CAFFE + name)
    return Maker(partial(TrainedNet, str(path)), "", "", sha256_of(path))


LIBRARIES: dict[str, Callable[[str], Maker]] = {
    "caffe": _caffe,
    "timm": _timm,
    "torchvision": _torchvision,
}
"""Prefixes of networks: caffe:PATH, a prototxt; timm:NAME and torchvision:NAME, if installed."""


def _installed(library: str) -> Any:
    try:
        return import_module(library)
    except (ImportError, OSError, RuntimeError) as error:  # raised if built for another torch
        said = " ".join(str(error).split())
        raise RecipeError(
            f"{WORD} is one of {library}'s networks, and {library} cannot be imported ({said}); "
            f"pip install {library}, for torch {torch.__version__}"
        ) from error


def _unknown(library: str, name: str, known: list[str]) -> RecipeError:
    meant = did_you_mean(f"{library}:{name}", [f"{library}:{network}" for network in known])
    return RecipeError(f"{WORD}: {library} has no network called {name!r}{meant}")


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters; a norm layer frozen whole stays in evaluation mode. Raises RecipeError."""
    named = dict(network.named_parameters())
    for pattern in patterns:
        matches = [name for name in named if fnmatchcase(name, pattern)]
        if not matches:
            raise RecipeError(
                f"model.freeze has {pattern!r}, which no parameter of the network matches; they "
                f"are called {', '.join(list(named)[:4])} …"
            )
        for name in matches:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise RecipeError(
            f"model.freeze {list(patterns)} leaves none of the network's {len(named)} parameters "
            "to train"
        )
    for layer in network.modules() if patterns else ():
        parameters = list(layer.parameters(recurse=False))
        if (
            isinstance(layer, _NormBase)
            and parameters
            and not any(parameter.requires_grad for parameter in parameters)
        ):
            layer.eval()


LOADS = ("pretrained", "weights")
"""Arguments that make timm's and torchvision's functions load weights."""


@dataclass(frozen=True)
class Frozen:
    names: list[str]
    of: int
    fresh: list[str]
    """Names of parameters that are neither trained nor loaded."""

    def notes(self, config: ModelConfig) -> list[str]:
        if not config.freeze:
            return []
        notes = [f"model.freeze: {len(self.names)} of {self.of} parameters frozen"]
        if self.fresh:
            lacks = "has none that fits" if config.weights else "is empty"
            notes.append(
                f"warning: {len(self.fresh)} of {len(self.names)} frozen parameters stay as "
                f"model.name made them and are never trained (the first: {self.fresh[0]}), for "
                f"model.weights {lacks}"
            )
        return notes


def frozen_of(
    tied: Iterable[tuple[str, nn.Parameter]],
    config: ModelConfig,
    taken: FirstWeights | None,
    is_resumed: bool = False,
) -> Frozen:
    """Count the frozen parameters. `tied`: the network's parameters under all their names.

    `taken`: the report of `model.weights`, if read. `is_resumed`: all come from a checkpoint.
    """
    all_names = list(tied)
    first_name: dict[nn.Parameter, str] = {}
    for name, parameter in all_names:
        first_name.setdefault(parameter, name)
    named = {name: parameter for parameter, name in first_name.items()}
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    if is_resumed or (taken is None and any(config.args.get(word) for word in LOADS)):
        fresh = []
    elif taken is None:
        fresh = frozen
    else:  # the file may have only one of a tied parameter's names
        lacking = {*taken.missing, *taken.reshaped}
        ids = {id(parameter) for name, parameter in all_names if name in lacking}
        fresh = [name for name in frozen if id(named[name]) in ids]
    return Frozen(frozen, len(named), fresh)
