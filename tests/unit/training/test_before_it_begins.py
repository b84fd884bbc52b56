"""What is known before the first step: plug-ins, recipes that cannot be, and where ranks record."""

import json
import os
import re
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import firecaffe
from firecaffe import Recipe, TrainConfig
from firecaffe.cluster.world import FOLDER, World
from firecaffe.data.batches import TrainBatches
from firecaffe.errors import CheckpointError, DataError, OwnCodeError, RecipeError, RunError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import (
    APART,
    ENVIRONMENT,
    MARK,
    RunConfig,
    apart_mark,
    continue_run_folder,
    elsewhere,
    mark_of,
)
from firecaffe.training import start
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.checks import check_not_float16, preflight
from firecaffe.training.forward import _deterministic, check_compiler
from firecaffe.training.plugins import VARIABLE, Plugin, load_plugins
from firecaffe.training.saver import Write
from firecaffe.training.training_folder import Places, find_places
from tests.kit.training import ALONE, before_each, recipe_in, recipe_with, record_of
from tests.kit.training import data as points
from tests.kit.training_fixtures import Patch
from tests.ranks.networks import small_data
from tests.unit.models.own_nets import PLACE
from tests.unit.tasks.test_table import OWN

# --- plug-ins -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noting(Plugin):
    """Notes what it is asked for and changes nothing."""

    name: str
    seen: list[str]

    def check(self, world_size: int) -> None:
        self.seen.append(f"{self.name} check {world_size}")

    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        note = self.seen.append
        return before_each(batches, lambda step, leaf: note(f"{self.name} batch {step}.{leaf}"))

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
    for names in ("", " ", ","):
        monkeypatch.setenv(VARIABLE, names)
        assert load_plugins() == ()
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


@dataclass(frozen=True)
class Blocking(Plugin):
    """Puts a pipe where a file is to be."""

    path: Path

    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        if not self.path.exists():  # batches are asked for twice
            os.mkfifo(self.path)
        return batches


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    blocking = Blocking(tmp_path / "run" / "result.json")
    name_plugins(monkeypatch, blocking=SimpleNamespace(plugin=lambda: blocking))
    with pytest.raises(RunError, match=r"run/result\.json"):
        train_in(tmp_path / "run")


def raise_in_lines() -> Plugin:
    raise ValueError("three\nlines\nlong")


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (None, "ModuleNotFoundError"),  # what Python says of a module that is None there
        (SimpleNamespace(), "has no attribute 'plugin'"),
        (SimpleNamespace(plugin=raise_in_lines), "ValueError: three lines long"),
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


# --- recipes --------------------------------------------------------------------------------------

WORDS = "model.name=lenet data.name=generated train.global_batch_size=8 train.micro_batch_size=4"


def look(words: str) -> None:
    preflight(check_recipe(recipe_with(f"{WORDS} train.device=cpu train.steps=1 {words}")), 2)


@pytest.mark.parametrize("function", ["loss_fails", "metric_fails"])
def test_an_own_task_is_tried_on_a_sample(function: str) -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(OwnCodeError, match=rf"task\.name '{OWN}:{function}'.*LookupError") as told:
        look(f"task.name={OWN}:{function}")
    assert "own.py" in told.value.traceback
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_own_loss_is_tried_as_in_an_evaluation() -> None:
    with pytest.raises(OwnCodeError, match=r"loss_of_slopes.* evaluation.*enable_grad.*Runtime"):
        look(f"task.name={OWN}:loss_of_slopes")


def test_a_network_that_takes_no_zeros_is_tried_on_a_sample() -> None:
    look(f"model.name={PLACE}:Packed data.name={PLACE}:sequences")


@pytest.mark.parametrize(("function", "said"), [("two_losses", "one number"), ("nan", "is nan")])
def test_what_an_own_loss_gives_is_looked_at(function: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        look(f"task.name={OWN}:{function}")


def test_what_can_be_learned_passes() -> None:
    """And the look at the shapes, in evaluation, leaves no layer as one that is not trained."""
    look(f"task.name={OWN}:loss_fails_later")
    look("model.name=resnet18 train.batch_norm_samples=8")


def test_what_gpus_do_not_take_is_known_before_the_ranks(monkeypatch: Patch) -> None:
    """`train.device` is auto: whether there are GPUs is asked of this host."""
    served = "synchrony.mode=asynchronous synchrony.lock=none train.global_batch_size=16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match=r"on GPUs with synchrony\.lock = none"):
        look(f"{served} train.device=auto")


class Put(torch.autograd.Function):
    """Its backward has no deterministic kernel, as that of many interpolations on GPUs."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient.clone().put_(torch.tensor([0]), torch.ones(1))


def test_an_operation_without_a_deterministic_kernel_is_named(tmp_path: Path) -> None:
    def network() -> nn.Module:
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
        net.register_forward_hook(lambda _, __, outputs: Put.apply(outputs))  # type: ignore[no-untyped-call]
        return net

    recipe = recipe_in(tmp_path / "run", train={"global_batch_size": 4, "micro_batch_size": 2})
    with _deterministic(), pytest.raises(RecipeError, match=r"^put_ .* train\.deterministic"):
        firecaffe.train(recipe, network, small_data(8), small_data(4, 1))


def test_without_a_compiler_it_is_said(monkeypatch: Patch) -> None:
    from torch._inductor import cpp_builder, exc

    def none_is_there() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_is_there)
    check_compiler("cuda")
    with pytest.raises(RecipeError, match=r"train\.compile .* C\+\+ compiler .* CXX") as caught:
        check_compiler("cpu")
    assert len(str(caught.value).splitlines()) == 1


def test_only_rank_0s_host_needs_the_checkpoints(tmp_path: Path) -> None:
    """A run without a shared disk leaves timings, and no checkpoint, on every other host."""
    (tmp_path / "timings").mkdir()
    recipe = check_recipe(recipe_with(f"{WORDS} train.device=cpu train.steps=1"))
    preflight(recipe, 2, tmp_path, is_new=False)
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        preflight(recipe, 2, tmp_path)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="damaged"):
        preflight(recipe, 2, tmp_path, is_new=False)


# --- folders --------------------------------------------------------------------------------------


def find(folder: str, first: Path, steps: int = 0) -> Places:
    return find_places(ALONE, RunConfig(folder), first, "a run", steps)


def folder_of(run: str, path: Path, **facts: object) -> Path:
    path.mkdir(parents=True)
    (path / ENVIRONMENT).write_text(json.dumps({MARK: run, **facts}))
    return path


@pytest.mark.parametrize("named", ["", "own"])
def test_who_does_not_see_rank_0s_folder_makes_one(
    tmp_path: Path, monkeypatch: Patch, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # There may be a folder of that name here, of another run.
    first = folder_of("an earlier run", tmp_path / "there" / "name")
    seen = find("another", folder_of("a run", tmp_path / "seen"))
    assert (seen.own, seen.is_apart, seen.notes("a host")) == (tmp_path / "seen", False, [])
    places = find(named, first)
    assert places.own == tmp_path / (named or "runs/name")
    assert places.is_apart
    assert mark_of(places.own) == apart_mark("a run")
    assert (places.own / "timings").is_dir()
    (line,) = places.notes("node-a")
    for words in (f"{first}/checkpoints on node-a alone", str(places.own), ALONE.host):
        assert words in line


def test_a_next_attempt_goes_on_in_it(tmp_path: Path) -> None:
    """Rank 0's has the same path on its host, as it mostly has."""
    own = tmp_path / "own"
    find(str(own), own)
    rows = own / "timings" / "rank-1.jsonl"
    rows.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert find(str(own), own, 2).is_apart
    assert rows.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_no_other_run_s_folder_is_written_into(tmp_path: Path) -> None:
    own = folder_of("an earlier run", tmp_path / "own")
    with pytest.raises(RunError, match=f"{re.escape(str(own))} exists already on .*two runs never"):
        find(str(own), tmp_path / "nowhere")
    assert [path.name for path in own.iterdir()] == [ENVIRONMENT]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/own on .*: Not a directory"):
        find(str(tmp_path / "file/own"), tmp_path / "x")


def test_rank_0_without_the_folder_does_not_begin_anew(tmp_path: Path, monkeypatch: Patch) -> None:
    """As on another host after a restart; a folder of its own there may have the same path."""
    store = HashStore()
    store.set(f"{FOLDER}/0", str(tmp_path))
    world = World(0, 1, torch.device("cpu"), store=store)
    monkeypatch.setattr(start, "_calls", count())
    with pytest.raises(RunError, match=r"is not on .*, on which rank 0 is now") as said:
        start.find_start(world, str(tmp_path / "an earlier run"))
    assert "\n" not in str(said.value)
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(start, "_calls", count())
    assert start.find_start(world, None).folder == tmp_path


def test_where_other_timings_are(tmp_path: Path) -> None:
    apart = {"1": ["node-b", "/b/run"], "2": ["node-b", "/b/run"], "3": ["node-c", "/c/run"]}
    run = folder_of("a run", tmp_path / "run", **{APART: apart})
    (line,) = Places(run, run, apart={r: (f"node-{r // 2}", "/a") for r in range(2, 200)}).notes("")
    assert ("node-1 keeps the timings of rank 2, 3 in /a" in line, "95 others" in line) == (
        True,
    ) * 2
    b, c = elsewhere(run, [0])
    assert "rank 1, 2 are on node-b in /b/run/timings" in b
    assert "rank 3 are on node-c" in c
    assert elsewhere(run, [0, 1, 2, 3]) == []
    assert elsewhere(tmp_path, [0]) == []


def test_what_a_killed_attempt_has_left_goes(tmp_path: Path) -> None:
    """Only the same step would be written over, and by time other steps are saved."""
    checkpoints = tmp_path / "checkpoints"
    whole, before = checkpoints / "step-00000002", checkpoints / ".step-00000003.before.partial"
    for folder in (whole, before, checkpoints / ".step-00000004.partial"):
        folder.mkdir(parents=True)
        (folder / "state.safetensors").touch()
    (checkpoints / ".optimizer.partial").touch()
    continue_run_folder(tmp_path, 2)
    assert sorted(checkpoints.iterdir()) == sorted([whole, before])


def test_gradients_too_short_for_a_loss_scale_are_named() -> None:
    """torch's scaler says no more than that it attempts to unscale FP16 gradients."""
    named = {"head.bias": nn.Parameter(torch.zeros(2, dtype=torch.float16))}
    check_not_float16(Recipe(train=TrainConfig(autocast="bfloat16")), named)
    with pytest.raises(RecipeError, match=r"autocast float16 .*head\.bias is torch\.float16"):
        check_not_float16(Recipe(train=TrainConfig(autocast="float16")), named)


class Together(nn.Linear):
    """Two buffers in one memory, of which forward may change one."""

    def __init__(self, changes: bool) -> None:
        super().__init__(2, 4)
        self.changes = changes
        self.register_buffer("one", torch.zeros(4))
        self.register_buffer("other", self.get_buffer("one")[2:])

    def forward(self, values: Tensor) -> Tensor:
        if self.changes and self.training:
            self.get_buffer("one").add_(1)
        return super().forward(values) * (1 + self.get_buffer("other").sum())


@pytest.mark.parametrize("changes", [False, True])
def test_buffers_in_one_memory_are_taken_if_none_changes(changes: bool, tmp_path: Path) -> None:
    sizes = {"global_batch_size": 12, "micro_batch_size": 2, "steps": 1}
    recipe, sets = recipe_in(tmp_path / "run", train=sizes), (points(40, 0), points(8, 1))
    if not changes:
        firecaffe.train(recipe, lambda: Together(changes), *sets)
        return
    with pytest.raises(RecipeError, match="share memory"):
        firecaffe.train(recipe, lambda: Together(changes), *sets)
