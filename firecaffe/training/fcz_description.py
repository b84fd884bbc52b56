"""The description of a network in a .fcz file: settings of a recipe, and facts about the run.

The file holds no code, and code that it names is not trusted. A Caffe net is not code: the file has
its name and digest, and the prototxt lies next to the file.
"""

from collections.abc import Container
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from torch import Tensor, nn

from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.files import sha256_of
from firecaffe.meta_kernels import on_meta
from firecaffe.models import ModelConfig
from firecaffe.models.network import make_network, with_outline
from firecaffe.models.weights import FCZ, Outline, outline_of
from firecaffe.recipe.checked_recipe import check_recipe, recipe_from, untrusted
from firecaffe.recipe.sections import Recipe, flatten
from firecaffe.training.given_parts import NOTHING, About
from firecaffe.user_code import CAFFE, caffe_file, is_caffe, is_reference, shown, without_folder

if TYPE_CHECKING:
    from firecaffe.compression.fcz import FczFile

SECTIONS = ("model", "data", "task")
"""The sections of a recipe that define a network, its data and its task."""

LEFT_OUT = (
    *("model.weights", "model.freeze", "data.path", "data.cache", "data.cache_bytes"),
    *("data.decode_threads", "data.hold_out", "data.order", "data.balance"),
    *("data.mixup", "data.cutmix", "data.erasing", "data.mirror"),
)
"""Settings of these sections that belong to a machine or to a training."""

KINDS: dict[str, type] = {
    "num_classes": int,
    "in_channels": int,
    "class_names": str,
    "sample_CHW": int,
    "is_decoded": bool,
    "input_shape": int,
    "input_dtype": str,
}
"""The facts of `About` that a file has, with the type of each, or of its elements."""

SHAPES = ("sample_CHW", "input_shape")
LISTS = ("class_names", *SHAPES)

MAX_SAMPLE = 1 << 24
"""The most elements of a sample: an export allocates one of the shape that the file states."""

NETS = "nets"
"""The file's key for the SHA-256 of the Caffe nets that it names, by section."""


def is_coded(where: Path) -> bool:
    return where.suffix == FCZ and where.is_file()


def _opened(file: Path) -> AbstractContextManager["FczFile"]:
    from firecaffe.compression import fcz  # imported here, because only .fcz files need it

    return fcz.read(file)


def describe(recipe: Recipe, about: About) -> dict[str, Any]:
    """Describe a network for `fcz.write`: what differs from the defaults. Raises: RecipeError."""
    default = flatten(Recipe())
    network: dict[str, Any] = {}
    for word, value in flatten(recipe).items():
        section, _, name = word.partition(".")
        is_needed = word == "model.name" or value != default[word]
        if section in SECTIONS and word not in LEFT_OUT and is_needed:
            network.setdefault(section, {})[name] = value
    for section in SECTIONS:
        name = getattr(recipe, section).name
        if is_caffe(name):
            network[section]["name"] = without_folder(name)
            digest = sha256_of(caffe_file(f"{section}.name", name))
            network.setdefault(NETS, {})[section] = digest
    for fact in KINDS:
        value = getattr(about, fact)
        if value != getattr(NOTHING, fact):
            network[fact] = list(value) if isinstance(value, tuple) else value
    return network


def tensors_of(network: nn.Module) -> dict[str, NDArray[Any]]:
    """Return a network's arrays, tied ones once. Raises: RecipeError for a type numpy lacks."""
    known: set[int] = set()
    arrays = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or id(tensor) in known:
            continue
        known.add(id(tensor))
        try:
            arrays[name] = tensor.detach().cpu().numpy()
        except TypeError as error:
            raise RecipeError(f"{name} is of {tensor.dtype}, which a .fcz file has not") from error
    return arrays


def described(
    file: Path, named: Container[str], *, trust_code: bool = False
) -> tuple[Recipe, About]:
    """Read what a file says of its network. named: settings that the user gives.

    trust_code: whether its code may run. Raises: RecipeError without a network; CheckpointError.
    """
    with _opened(file) as opened:
        network = opened.network
    if "model" not in network and "model.name" not in named:
        raise RecipeError(
            f"{file}: does not say which network it is; name it: --model.name NAME, or "
            f'load("{file}", model=…)'
        )
    try:
        sections = {name: network[name] for name in SECTIONS if name in network}
        settings = (f"{name}.{word}" for name, section in sections.items() for word in section)
        if left_out := next((word for word in settings if word in LEFT_OUT), None):
            raise ValueError(f"{left_out} is no word of a file, but of a machine or of a training")
        recipe = recipe_from(sections)
        check_recipe(recipe)
        facts = {fact: network[fact] for fact in KINDS if network.get(fact) is not None}
        return recipe if trust_code else untrusted(recipe, file), _about(facts)
    except (RecipeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: does not say what its network is: {error}") from error


def with_nets(file: Path, own: Recipe, named: Container[str]) -> Recipe:
    """Return `own`, the file's recipe, with the paths of its Caffe nets. Raises: RecipeError.

    They lie beside the file or in the current folder. named: settings that the user gives.
    """
    with _opened(file) as opened:
        digests = opened.network.get(NETS)
    for section in SECTIONS:
        word, name = f"{section}.name", getattr(own, section).name
        if is_caffe(name) and word not in named:
            digest = digests.get(section) if isinstance(digests, dict) else None
            own = own.replace(word, f"{CAFFE}{_net_of(file, word, name, digest)}")
    return own


def _net_of(file: Path, word: str, name: str, digest: str | None) -> Path:
    # A file cannot name a net in any other folder.
    base = without_folder(name).removeprefix(CAFFE)
    folders = dict.fromkeys((file.absolute().parent, Path.cwd()))
    there = [folder / base for folder in folders if (folder / base).is_file()]
    for path in there:
        if digest is None or sha256_of(path) == digest:
            return path
    problem = (
        f"{there[0]} is another net than its own"
        if there
        else f"there is no {base} in {' or '.join(map(str, folders))}"
    )
    raise RecipeError(
        f"{file}: {word} is {name!r}, and {problem}; put its net into its folder, or say where "
        f"one is: --{word} {CAFFE}PATH"
    )


def check_outline(file: Path, config: ModelConfig, about: About) -> None:
    """Raise CheckpointError if the network cannot be built, or its tensors are not the file's."""
    try:
        outline = _outline(config, about)
    except RecipeError as error:
        if is_reference(config.name):
            raise
        raise CheckpointError(f"{file}: cannot be a network: {error}") from error
    with _opened(file) as opened:
        held = {tensor.name: tensor.shape for tensor in opened.outlines}
    for names, shape in outline.values():
        name = next((candidate for candidate in names if candidate in held), None)
        if name is None or held[name] != tuple(shape):
            problem = "missing" if name is None else f"of shape {held[name]}"
            raise CheckpointError(
                f"{file}: {name or names[0]} is {problem}; in the network {config.label} it is of "
                f"shape {tuple(shape)}"
            )


def _outline(config: ModelConfig, about: About) -> Outline:
    # Allocates no weights, because the file states their number. Code that the user named may.
    counts = about.num_classes, about.in_channels
    if is_reference(config.name):
        return with_outline(config, *counts, outline_of)
    with on_meta():
        return outline_of(make_network(config, *counts))


def _about(facts: dict[str, Any]) -> About:
    for fact, value in facts.items():
        kind = KINDS[fact]
        whole = value if isinstance(value, list) else [value]
        if isinstance(value, list) != (fact in LISTS) or any(type(x) is not kind for x in whole):
            raise ValueError(f"{fact} is {shown(value)}")
        if fact in SHAPES and (min(value, default=1) < 1 or prod(value) > MAX_SAMPLE):
            raise ValueError(f"{fact} is {shown(value)}; at most {MAX_SAMPLE:,} numbers a sample")
        if fact in LISTS:
            facts[fact] = tuple(value)
    return replace(NOTHING, **facts)
