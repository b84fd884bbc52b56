"""A training's data, network and task: the recipe's or a user's; facts about them (about.json)."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import nn

from firecaffe.data import (
    Data,
    DataConfig,
    DataParts,
    Dataset,
    divide,
    is_images,
    num_classes,
    open_data,
)
from firecaffe.data.batches import output_shape
from firecaffe.data.dataset import Layout, TensorLayout, layout_of
from firecaffe.data.decode import DecodedSet
from firecaffe.data.own_data import check_own
from firecaffe.data.sources import check_words
from firecaffe.errors import DataError, RecipeError, RunError
from firecaffe.files import write_json
from firecaffe.gradients.bucket_sums import Hook
from firecaffe.inventory.network_state import check_state
from firecaffe.models.extra_state import hold_extra_state
from firecaffe.models.low_rank import make_low_rank
from firecaffe.models.network import freeze, made_by, make_network
from firecaffe.recipe.sections import Recipe
from firecaffe.schema import read_file
from firecaffe.tasks import OWN_TASK, Loss, Task, TaskConfig, task_of
from firecaffe.tasks.known_tasks import check_own_task, check_parameters
from firecaffe.tasks.task import over_samples
from firecaffe.training.forward import seed_random, set_memory_format
from firecaffe.training.parallel.mesh import check_is_whole
from firecaffe.user_code import shown


@dataclass(frozen=True)
class Parts:
    """Objects that a user may give instead of what the recipe names."""

    model: Callable[[], nn.Module] | None = None
    loss: Loss | None = None
    task: Task | None = None
    train: Any = None
    test: Any = None
    validation: Any = None
    comm_hook: tuple[object, Hook] | None = None

    @property
    def facts_for_check(self) -> dict[str, Any]:
        return {
            "comm_hook": self.comm_hook is not None,
            "model": self.model is not None,
            "validation_set": self.validation is not None,
        }

    @property
    def are_named(self) -> bool:
        """Whether the recipe names all of them."""
        return all(part is None for part in vars(self).values())

    @property
    def has_own_task(self) -> bool:
        return self.loss is not None or self.task is not None

    @property
    def hook_name(self) -> str:
        if self.comm_hook is None:
            return ""
        return str(getattr(self.comm_hook[1], "__qualname__", "of the user"))


def check_arguments(recipe: Any, parts: Parts, resume: Any) -> None:
    """Check the arguments of `firecaffe.train` before any rank waits. Raises: RecipeError."""
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"recipe is {shown(recipe)}; expected a firecaffe.Recipe(train=firecaffe.TrainConfig("
            "WORD=VALUE, …), …), or the path of a recipe's file"
        )
    _check_model(parts.model)
    check_loss_and_task(recipe, parts.loss, parts.task)
    hook = parts.comm_hook
    if hook is not None and not (isinstance(hook, tuple) and len(hook) == 2 and callable(hook[1])):
        raise RecipeError(f"comm_hook is {shown(hook)}; expected the pair (state, hook)")
    if resume is not None and not isinstance(resume, str | Path):
        raise RecipeError(f"resume is {shown(resume)}; expected the path of a run or a checkpoint")


def _check_model(model: Any) -> None:
    if model is None:
        return
    if isinstance(model, nn.Module):
        raise RecipeError(
            f"model is a network that is made already ({type(model).__name__}); expected the "
            f"function that makes it, so that its first weights are the seed's: {_suggest(model)}"
        )
    if not callable(model):
        raise RecipeError(
            f"model is {shown(model)}; expected a function that makes a network. One of "
            "firecaffe's own is named in the recipe: ModelConfig(name)"
        )
    check_no_arguments(model)


def check_no_arguments(model: Callable[..., Any]) -> None:
    """Raise RecipeError if a network's maker cannot be called without arguments."""
    try:
        signature = inspect.signature(model)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(model, "__qualname__", type(model).__qualname__)
        raise RecipeError(
            f"model is {name}{signature}, which is called without arguments ({error}); give "
            f"lambda: {name}(…)"
        ) from None


def _suggest(model: nn.Module) -> str:
    """Return the argument to write instead of a network that is already made."""
    kind = type(model)
    try:
        inspect.signature(kind).bind()
    except (TypeError, ValueError):
        return f"model=lambda: {kind.__name__}(…)"
    # A Sequential without arguments would be an empty one.
    is_own = kind.__init__ is not nn.Sequential.__init__
    return f"model={kind.__name__}" if is_own else f"model=lambda: {kind.__name__}(…)"


def open_parts(recipe: Recipe, parts: Parts) -> Data:
    """Open the data of a training. Raises: DataError; RecipeError."""
    if parts.train is None and parts.test is None and parts.validation is None:
        return open_data(recipe.data)
    if parts.train is None or parts.test is None:
        raise DataError("train_set and test_set come together; one of them is missing")
    check_words(recipe.data)
    validation = parts.validation
    data_parts = DataParts(
        check_own("train_set", parts.train),
        check_own("test_set", parts.test),
        None if validation is None else check_own("validation_set", validation),
    )
    return divide(data_parts, recipe.data)


def counts_of(dataset: Dataset) -> tuple[int | None, int | None]:
    """Return the data's numbers of classes and channels, each None if the data lack it."""
    if is_images(dataset):
        return dataset.num_classes, dataset.sample_CHW[0]
    return num_classes(dataset), layout_of(dataset).channels


def build_network(
    recipe: Recipe, parts: Parts, dataset: Dataset, device: torch.device
) -> nn.Module:
    """Build the network with fresh weights on this rank's device. Raises: RecipeError."""
    model = make_model(recipe, parts, dataset)
    check_state(model)
    _check_values(model)
    place_model(model, recipe, device)
    return model


def _check_values(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise RecipeError(
                f"{name} of the network is on the meta device, so it has no values; expected "
                "parameters and buffers in memory. Keep a network of shapes alone, as the base of "
                "torch.func.functional_call, in a list: self.base = [base]"
            )


def make_model(recipe: Recipe, parts: Parts, dataset: Dataset) -> nn.Module:
    """Make the network with fresh weights, mostly on the CPU. Raises: as `build_network`."""
    seed_random(recipe.train.seed, "weights")
    if parts.model is None:
        model = make_network(recipe.model, *counts_of(dataset))
    else:
        model = check_is_whole(made_by(parts.model))
        make_low_rank(model, recipe.model.low_rank)
        freeze(model, recipe.model.freeze)
    hold_extra_state(model)
    return model


def place_model(model: nn.Module, recipe: Recipe, device: torch.device) -> None:
    model.to(device)
    set_memory_format(model, recipe.train)


def check_loss_and_task(recipe: Recipe, loss: Any, task: Any) -> None:
    """Check the `loss` and the `task` of `firecaffe.train`. Raises: RecipeError."""
    check_parameters("loss", loss)
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise RecipeError(
            f"loss is {shown(loss)}; expected a function of (outputs, labels), as "
            "torch.nn.CrossEntropyLoss() is"
        )
    if task is None:
        return
    if loss is not None:
        raise RecipeError("loss and task are both given; give the loss to the task: Task(loss, …)")
    if not isinstance(task, Task):
        raise RecipeError(f"task is {shown(task)}; expected a firecaffe.Task(loss, metrics={{…}})")
    if recipe.task not in (TaskConfig(), TaskConfig(OWN_TASK)):
        raise RecipeError("task is given, and the recipe has a [task] too; leave one out")
    check_own_task(task)


def task_for(recipe: Recipe, loss: Loss | None, task: Task | None, dataset: Dataset) -> Task:
    """Return a training's task. Raises: RecipeError; OwnCodeError for a user's errors."""
    if task is not None:
        return task
    if loss is not None and recipe.task == TaskConfig() and not _has_classes(dataset):
        return Task(over_samples(loss))  # without classes there is no accuracy
    named_task = task_of(recipe.task, getattr(dataset, "num_classes", None))
    return named_task if loss is None else replace(named_task, loss=over_samples(loss))


def _has_classes(dataset: Dataset) -> bool:
    targets = layout_of(dataset).targets
    is_number = isinstance(targets, TensorLayout) and targets.shape == ()
    return is_number and not (targets.dtype.is_floating_point or targets.dtype.is_complex)


ABOUT = "about.json"

Size = Annotated[int, Meta(ge=0, le=10**9)]


@dataclass(frozen=True)
class About:
    """Facts that the network was built for and that no recipe states."""

    num_classes: Size | None
    in_channels: Size | None
    class_names: tuple[str, ...]
    sample_CHW: tuple[Size, ...]
    """The images' shape before cropping. Empty unless samples are images of bytes with classes."""
    is_decoded: bool
    """Whether the samples are encoded images, which are decoded and scaled when they are read."""
    input_shape: tuple[Size, ...]
    """The shape of one sample as the network receives it. Empty if inputs are not one tensor."""
    input_dtype: str
    given: tuple[str, ...]
    """The arguments of `firecaffe.train` that replaced what the recipe names."""

    def stored_shape(self, config: DataConfig) -> tuple[int, int, int]:
        """Return the images' shape before cropping: of `config.resize` if they are decoded."""
        channels, rows, columns = self.sample_CHW
        return (channels, *((config.resize,) * 2 if self.is_decoded else (rows, columns)))

    def check(self, config: DataConfig) -> None:
        """Raise RecipeError if settings of the data cannot be those of the network's inputs."""
        check_words(config)
        if self.sample_CHW:
            output_shape(self.stored_shape(config), config)


def about_of(parts: Parts, data: Data) -> About:
    test = data.test
    CHW: tuple[int, ...] = ()
    is_decoded = isinstance(test, DecodedSet)
    if is_images(test) and (is_decoded or _inputs(layout_of(test))[1] == "uint8"):
        CHW = tuple(test.sample_CHW)
    shape, dtype = _inputs(data.layout)
    given_parts = {
        "model": parts.model,
        "loss": parts.loss,
        "task": parts.task,
        "train_set": parts.train,
    }
    return About(
        *counts_of(data.train),
        class_names=data.class_names,
        sample_CHW=CHW,
        is_decoded=is_decoded,
        input_shape=shape,
        input_dtype=dtype,
        given=tuple(name for name, value in given_parts.items() if value is not None),
    )


# The facts of a network without a run folder.
NOTHING = About(None, None, (), (), False, (), "", ())


def _inputs(layout: Layout | None) -> tuple[tuple[int, ...], str]:
    if layout is None or not isinstance(layout.inputs, TensorLayout):
        return (), ""
    return layout.inputs.shape, str(layout.inputs.dtype).removeprefix("torch.")


def write_about(folder: Path, about: About) -> None:
    write_json(folder / ABOUT, asdict(about))


def read_about(folder: Path) -> About | None:
    """Read about.json; None if the run is too old to have it. Raises: RunError if damaged."""
    path = folder / ABOUT
    about = read_file(path, About, RunError) if path.exists() else None
    if about is not None and len(about.sample_CHW) not in (0, 3):
        raise RunError(f"{path}: sample_CHW is {about.sample_CHW}, expected three sizes, or none")
    return about
