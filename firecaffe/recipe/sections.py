"""A whole run as data: a recipe of the sections of all parts, its file, and what decides bits."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import tomli_w

from firecaffe.compression import PruneConfig, ShareConfig
from firecaffe.data import DataConfig
from firecaffe.errors import RecipeError
from firecaffe.files import write_atomically
from firecaffe.gradients.config import NO_COMPRESSOR, ExchangeConfig
from firecaffe.models import ModelConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.runs.run_folder import RunConfig
from firecaffe.solvers.config import SolverConfig, needs_norms
from firecaffe.solvers.rate_policy import LENGTH_DEPENDENT
from firecaffe.synchrony.config import EVERY_STEP, LOCAL, SynchronyConfig
from firecaffe.tasks import TaskConfig
from firecaffe.user_code import REFERENCES, without_folder


@dataclass(frozen=True)
class TrainConfig:
    """How long, in which batches and in which arithmetic a network is trained.

    Args:
        global_batch_size: Samples of one step, over all workers.
        micro_batch_size: Samples that go through the network at once. Micro-batches are the leaves
            of the summation tree, and BatchNorm computes its statistics over each. The number of
            workers never changes it.
        steps: Optimizer updates; or set `epochs`.
        epochs: Passes over the training data; or set `steps`. One, if neither is set.
        seed: Decides initial weights, the order of samples, augmentation and dropout.
        device: auto, cpu or cuda.
        threads: Intra-op threads of each worker on a CPU. They change bits; use 1 and more workers.
        autocast: Compute in bfloat16 or float16 where torch's autocast considers it safe.
        channels_last: Keep images and weights with the channels innermost in memory.
        compile: Train with code that torch.compile makes for the network. Its bits differ from
            those without, and are the same on any number of workers. Needs a C++ compiler on a CPU.
        deterministic: On a GPU, use only kernels that give the same bits every time.
        eval_every: Evaluate on the validation samples (`data.hold_out`, or those of the data set)
            every so many steps. The test samples are used once, at the end.
        stop_after: Stop after so many evaluations in a row without a better one. 0: never.
        ema_decay: Keep a moving average of the weights with this decay, as 0.999, and evaluate it
            instead of them. 0: none.
        ema_warmup: Begin with a smaller decay, so that the average soon forgets the first weights.
        batch_norm_samples: Before evaluations, estimate BatchNorm's statistics from so many
            training samples with the present weights. 0: use the running statistics.
        eval_batch_size: Samples of one evaluation batch on one worker.
    """

    global_batch_size: int = 128
    micro_batch_size: int = 16
    steps: int = 0
    epochs: int = 0
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    channels_last: bool = False
    compile: bool = False
    deterministic: bool = True
    eval_every: int = 0
    stop_after: int = 0
    ema_decay: float = 0.0
    ema_warmup: bool = False
    batch_norm_samples: int = 0
    eval_batch_size: int = 250

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a step, of all workers together."""
        return self.global_batch_size // self.micro_batch_size

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the steps of the whole training."""
        return self.steps or (self.epochs or 1) * steps_per_epoch


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of a run is saved. Training continues while it is written.

    Args:
        every: Save every so many steps; 0: never by steps. The end is always saved.
        every_s: Save when so many seconds have passed since the last save; 0: never by time.
        keep_last: Number of newest checkpoints to keep; 0 keeps all. With one alone, there is none
            to go back to if the disk damages it.
        best: Save after every evaluation on validation samples that is better than all before, and
            keep the best checkpoint in addition to the newest; `checkpoints/best` names it.
    """

    every: int = 0
    every_s: float = 0.0
    keep_last: int = 3
    best: bool = False


class TreeLeaves(NamedTuple):
    """The terms of the sum over all workers: leaves of the tree."""

    number: int
    name: str
    """In the plural."""

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


@dataclass(frozen=True)
class Recipe:
    """One training, in sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    data: DataConfig = field(default_factory=DataConfig)
    """The samples, and how they are prepared."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, in which batches and in which arithmetic to train."""
    solver: SolverConfig = field(default_factory=SolverConfig)
    """The optimizer and its learning rate."""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    """How gradients are summed over the workers."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    run: RunConfig = field(default_factory=RunConfig)
    """The place where the run is recorded."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The loss, and what evaluations measure."""
    synchrony: SynchronyConfig = field(default_factory=SynchronyConfig)
    """When workers exchange, and who computes what."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Which workers hold one model together, and how it is split."""
    prune: PruneConfig = field(default_factory=PruneConfig)
    """Which weights are zero, and stay zero."""
    share: ShareConfig = field(default_factory=ShareConfig)
    """Which layers' weights share few values."""

    @classmethod
    def read(cls, path: str | Path) -> "Recipe":
        """Read a recipe's file, or a shipped recipe by its name, for example `nin_small`.

        Raises: RecipeError in one line that names the setting.
        """
        from firecaffe.recipe.checked_recipe import read_recipe_file

        return read_recipe_file(recipe_path(path))

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a file with every setting, atomically; a run has such a file as recipe.toml.

        Raises: RecipeError if the file cannot be written, or exists and `overwrite` is false.
        """
        if Path(path).exists() and not overwrite:
            raise RecipeError(f"{path}: exists already; overwrite=True writes over it")
        try:
            write_atomically(Path(path), to_toml(self))
        except OSError as error:
            raise RecipeError(f"{path} cannot be written ({error.strerror})") from error

    def replace(self, word: str, value: Any) -> Self:
        """Return the recipe with another value of a setting such as `solver.base_lr`.

        Raises: RecipeError if a recipe has no such setting.
        """
        section, _, name = word.partition(".")
        config: Any = getattr(self, section, None)
        if name not in getattr(config, "__dataclass_fields__", ()):
            raise RecipeError(f"{word}: a recipe has no such word; expected one as solver.base_lr")
        changed: Any = {section: dataclasses.replace(config, **{name: value})}
        return dataclasses.replace(self, **changed)

    @property
    def leaves(self) -> TreeLeaves:
        """The leaves of the tree over all workers: a step's micro-batches, or the replicas."""
        if self.synchrony.mode == LOCAL:
            return TreeLeaves(self.synchrony.replicas, "replicas")
        return TreeLeaves(self.train.num_micro_batches, "micro-batches")

    @property
    def updates_whole_layers(self) -> bool:
        """Whether an update needs whole parameters: norms, gaps, pruning or shared values."""
        needs_gaps = self.synchrony.compensate == "gap"
        return needs_norms(self.solver) or needs_gaps or self.prune.is_on or self.share.is_on


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Return all settings of a recipe by dotted name."""
    return {
        f"{section}.{word}": value
        for section, config in vars(recipe).items()
        for word, value in vars(config).items()
    }


def to_toml(recipe: Recipe) -> str:
    return tomli_w.dumps(dataclasses.asdict(recipe))


FOLDER = Path(__file__).parents[1] / "recipes"


def shipped() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def recipe_path(name_or_path: str | Path) -> Path:
    """Return the file of a recipe: its path, or that of a shipped name. Raises: RecipeError."""
    path = Path(name_or_path)
    if len(path.parts) != 1 or path.suffix or path.is_file():
        return path
    if path.name not in (names := shipped()):
        raise RecipeError(
            f"no recipe {str(path)!r} - it is no file and no shipped recipe - give a file (*.toml) "
            f"or one of {', '.join(names)}"
        )
    return FOLDER / f"{path.name}.toml"


_WITHOUT_BITS = (
    "data.path",
    "task.metrics",
    "task.metric",
    "train.device",
    "train.eval_every",
    "train.stop_after",
    "data.decode_threads",
    "data.cache",
    "data.cache_bytes",
    "train.eval_batch_size",
    "train.steps",
    "train.epochs",
    "synchrony.shares",
    "synchrony.shares_every",
    "synchrony.in_flight",
    "synchrony.server",
)
"""Settings that decide no bits, though others of their sections do."""


def identity(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Return the settings that decide bits, by dotted name. A run is only resumed with equal ones.

    Workers, exchange, checkpoints and paths are none. A compressor is one, as is the number of
    steps if the rate, the last workers of a server, or the averages of replicas depend on it.
    """
    synchrony = recipe.synchrony
    optional = {
        "prune": recipe.prune.is_on,
        "share": recipe.share.is_on,
        "synchrony": synchrony.mode != EVERY_STEP,
    }
    sections = {"model", "data", "train", "solver", "task"}
    sections |= {section for section, is_on in optional.items() if is_on}
    settings = {
        name: without_folder(value) if name in REFERENCES else value
        for name, value in flatten(recipe).items()
        if name.split(".")[0] in sections and name not in _WITHOUT_BITS
    }
    settings["exchange.compressor"] = recipe.exchange.compressor
    if recipe.exchange.compressor != NO_COMPRESSOR:
        settings["exchange.compressor_level"] = recipe.exchange.compressor_level
    if recipe.parallel.is_split:
        settings["parallel.split"] = recipe.parallel.split
        settings["parallel.parts"] = recipe.parallel.num_parts
        if not recipe.parallel.split:  # parallel.split names the layers, if set
            settings["parallel.scheme"] = recipe.parallel.scheme
    if recipe.solver.lr_policy in LENGTH_DEPENDENT or synchrony.depends_on_last_step:
        settings["train.steps"] = steps
    return settings


def search_id(recipe: Recipe) -> str:
    """Return the digest of a search's result, without the seed: 12 hexadecimal digits.

    It covers the length, and non-default settings that decide bits: new settings change nothing.
    """
    deciding = {*identity(recipe, recipe.train.steps), "train.steps", "train.epochs"}
    defaults, settings = flatten(Recipe()), flatten(recipe)
    if settings["train.steps"] or settings["train.epochs"] == 1:
        settings["train.epochs"] = 0  # one epoch is the default if neither is set
    changed = {
        word: settings[word]
        for word in deciding - {"train.seed"}
        if settings[word] != defaults[word]
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def tuned_by(recipe: Recipe) -> str:
    """The search that the learning rate is from; empty if the recipe was changed since."""
    return recipe.run.tuned if recipe.run.tuned.endswith(search_id(recipe)) else ""
