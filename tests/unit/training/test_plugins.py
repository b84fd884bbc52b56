"""Plug-ins: named by the environment, asked in order, and one line where they cannot be loaded."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor

import firecaffe
from firecaffe.cluster.world import World
from firecaffe.data import SampleOrder
from firecaffe.data.train_batches import TrainBatches
from firecaffe.errors import DataError, RecipeError
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.plugins import VARIABLE, Plugin, load_plugins
from firecaffe.training.saver import Write
from tests.kit.training import recipe_in, record_of
from tests.kit.training_fixtures import Patch


@dataclass(frozen=True)
class Noted:
    """Batches that are noted when they are asked for."""

    name: str
    batches: TrainBatches
    seen: list[str]

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def train_batch(self, step: int, leaf: int) -> tuple[Tensor, Tensor]:
        self.seen.append(f"{self.name} batch {step}.{leaf}")
        return self.batches.train_batch(step, leaf)


@dataclass(frozen=True)
class Noting(Plugin):
    """Notes what it is asked for and changes nothing."""

    name: str
    seen: list[str]

    def check(self, world_size: int) -> None:
        self.seen.append(f"{self.name} check {world_size}")

    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        return Noted(self.name, batches, self.seen)

    def around_write(self, write: Write, world: World) -> Write:
        def noted(folder: Path, checkpoint: Checkpoint) -> Path:
            self.seen.append(f"{self.name} checkpoint {checkpoint.step}")
            return write(folder, checkpoint)

        return noted


def train_in(folder: Path) -> str:
    """The digest of a training of two steps of two micro-batches."""
    train = {"global_batch_size": 4, "micro_batch_size": 2, "steps": 2, "eval_batch_size": 500}
    parts = "model.name=lenet data.name=generated checkpoint.every=2"
    return firecaffe.train(recipe_in(folder, parts, train=train)).state_sha256


def name_plugins(monkeypatch: Patch, **modules: object) -> None:
    """Lets the environment name modules of these members."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(VARIABLE, ",".join(modules))


def test_plugins_stand_around_batches_and_checkpoints(tmp_path: Path, monkeypatch: Patch) -> None:
    undisturbed = train_in(tmp_path / "undisturbed")
    seen: list[str] = []
    inner = SimpleNamespace(plugin=lambda: Noting("inner", seen))
    outer = SimpleNamespace(plugin=lambda: Noting("outer", seen))
    name_plugins(monkeypatch, inner=inner, outer=outer)
    assert train_in(tmp_path / "noted") == undisturbed
    assert record_of(tmp_path / "noted")["plugins"] == [f"{Noting.__module__}.Noting"] * 2
    leaves = [f"{step}.{leaf}" for step in range(2) for leaf in range(2)]
    batches = [f"{name} batch {leaf}" for leaf in leaves for name in ("outer", "inner")]
    saved = "outer checkpoint 2", "inner checkpoint 2"
    assert seen == ["inner check 1", "outer check 1", *batches, *saved]


def test_no_name_is_no_plugin(monkeypatch: Patch) -> None:
    for names in ("", " ", ","):
        monkeypatch.setenv(VARIABLE, names)
        assert load_plugins() == ()


def fail() -> Plugin:
    raise ValueError("three\nlines\nlong")


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (None, "ModuleNotFoundError"),  # what Python says of a module that is None there
        (SimpleNamespace(), "has no attribute 'plugin'"),
        (SimpleNamespace(plugin=fail), "ValueError: three lines long"),
        (SimpleNamespace(plugin=lambda: 3), "gave 3"),
    ],
)
def test_one_that_cannot_be_loaded_is_one_line(
    monkeypatch: Patch, module: object, found: str
) -> None:
    name_plugins(monkeypatch, broken=module)
    with pytest.raises(RecipeError) as caught:
        load_plugins()
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{VARIABLE}: broken")
    assert found in line


def test_what_a_plugin_refuses_it_says_itself(tmp_path: Path, monkeypatch: Patch) -> None:
    class Refusing(Plugin):
        def check(self, world_size: int) -> None:
            raise DataError(f"not with {world_size}")

    name_plugins(monkeypatch, refusing=SimpleNamespace(plugin=Refusing))
    with pytest.raises(DataError, match="not with 1"):
        train_in(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
