"""The package's own names: none hides a package, and none loads what it does not use."""

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import firecaffe
import firecaffe.data
import firecaffe.models
from firecaffe.cli import COMMANDS, MODULES
from firecaffe.cli.bench import PARTS

PACKAGES = [
    each.name for each in pkgutil.walk_packages(firecaffe.__path__, "firecaffe.") if each.ispkg
]


@pytest.mark.parametrize("name", firecaffe.__all__)
def test_a_name_hides_no_package(name: str) -> None:
    """`firecaffe.train` was a function and a package: each took the other's place."""
    assert getattr(firecaffe, name) is not None
    assert f"firecaffe.{name}" not in PACKAGES


def test_what_a_reader_of_types_sees_is_what_there_is() -> None:
    """And what tab completion and `help` show."""
    tree = ast.parse(Path(firecaffe.__file__).read_text("utf-8"))
    imports = (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom))
    typed = {name.asname for each in imports for name in each.names} - {None}
    assert typed == set(firecaffe.__all__) == set(dir(firecaffe))


@pytest.mark.parametrize("package", [firecaffe.data, firecaffe.models])
def test_a_name_that_is_imported_when_asked_for_hides_no_module(package: ModuleType) -> None:
    """Once the module `hold_out` is imported, it would stand where the function `hold_out` was."""
    modules = {each.name for each in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)


TRAINS = "firecaffe.training.build_training"
COMPILER = "torch._dynamo"
TESTS = "scipy.stats"
METRICS = "torchmetrics"
CODER = "constriction"
RANKS = (
    *("firecaffe.cluster.groups", "firecaffe.cluster.world", "firecaffe.cluster.launcher"),
    "firecaffe.transport",
)

OPTIONS = [
    f"firecaffe.cli.{MODULES.get(name, name)}"
    for name in (*COMMANDS, *(f"bench_{part}" for part in PARTS))
]
"""Modules of commands, each with its options, of which help is made."""

NOT_LOADED: dict[str, tuple[str, ...]] = {
    "firecaffe.recipe.sections": ("torch", "numpy"),
    **dict.fromkeys(("firecaffe.cli.help", *OPTIONS), ("torch", "numpy")),
    "firecaffe.cli.train": ("torch", "firecaffe.cli.arguments", "jsonargparse"),
    "firecaffe.cli.start_training": (TRAINS, COMPILER, TESTS, METRICS, CODER),
    TRAINS: ("jsonargparse", "firecaffe.cluster.launcher", COMPILER, TESTS, METRICS, CODER),
    "firecaffe.script.launch": (TRAINS, COMPILER, TESTS, METRICS),
    "firecaffe.script.attach": (TRAINS, COMPILER, TESTS, METRICS),
    "firecaffe.script.split": (TRAINS, COMPILER, TESTS, METRICS),
    "firecaffe.script.parallelize": (TRAINS, COMPILER, TESTS, METRICS),
}
"""What a module does not load until it is used, for it takes long: a second, or all that trains."""

NOT_LOADED_TO_RUN: dict[str, tuple[str, ...]] = {
    "compare": ("torch", TESTS),
    "verify": (COMPILER, TESTS, METRICS, CODER),
    "tune": (COMPILER, TESTS, METRICS),
    "check": (COMPILER, TESTS, METRICS),
    "bench_exchange": (COMPILER, TESTS, METRICS),
    "bench_step": (COMPILER, TESTS, METRICS),
    "bench_data": (COMPILER, TESTS, METRICS),
    "compress": (COMPILER, TESTS, METRICS),
    "replay": (COMPILER, TESTS, METRICS),
    "evaluate": (TRAINS, COMPILER, TESTS, METRICS),
    "predict": (TRAINS, COMPILER, TESTS, METRICS),
    "export": (TRAINS, COMPILER, TESTS, METRICS),
    "profile": (TRAINS, COMPILER, TESTS, METRICS, CODER),
    "unpack": (TRAINS, COMPILER, TESTS, METRICS),
    "pack": (TRAINS, COMPILER, TESTS, METRICS, CODER),
    "import_caffe": (TRAINS, COMPILER, TESTS, METRICS, CODER),
    "demo": (COMPILER, TESTS, METRICS, CODER),
    "explain": (TRAINS, COMPILER, METRICS, CODER),
}
"""What the functions of a command do not import."""

RUN = """
import os, torch
from pathlib import Path
import firecaffe
from firecaffe.training.checks import preflight
from firecaffe.tasks import CLASSIFICATION, TaskConfig, task_of

of_model = firecaffe.ModelConfig("lenet_300_100"), firecaffe.DataConfig("generated")
train = firecaffe.TrainConfig(8, 4, steps=1, eval_batch_size=1000, device="cpu")
run = firecaffe.RunConfig(folder=f"{folder}/run", tensorboard=False)
recipe = firecaffe.Recipe(*of_model, train, run=run)
preflight(recipe, 1)
firecaffe.train(recipe)
assert CLASSIFICATION.measured and CLASSIFICATION.measure
assert task_of(TaskConfig("regression"), None).measure.name == "mae"
"""
"""What a launcher does, and then a rank; and tasks whose metrics are ours."""

PLAN = """
import os
import torch.distributed as dist
from firecaffe.cli.plan import main

os.fork = os.posix_spawn = None
main(["--model", "googlenet", "--cluster", "dgx-a100", "--workers", "1,2,16"])
main(["nin_small", "--workers", "1,2"])
assert not dist.is_initialized()
"""
"""A whole plan, which starts no process."""

EACH_ALONE = """
import importlib, json, operator, os, sys
not_loaded, programs, packages, folder = json.loads(sys.argv[1])

def alone(name, work):
    if (child := os.fork()) == 0:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name

def load(name):
    importlib.import_module(name)
    loaded = set(not_loaded[name]) & set(sys.modules)
    assert not loaded, (name, loaded)

def run(program):
    exec(program, {"folder": folder})
    loaded = set(programs[program]) & set(sys.modules)
    assert not loaded, (program, loaded)

def places():
    import firecaffe.training.loop
    for name in packages:
        module = importlib.import_module(name)
        assert operator.attrgetter(name.removeprefix("firecaffe."))(firecaffe) is module, name
    assert firecaffe.training.loop.Training and callable(firecaffe.train)

for name, heavy in not_loaded.items():
    if "torch" in heavy:
        alone(name, lambda: load(name))
for program, heavy in programs.items():
    if "torch" in heavy:
        alone(program, lambda: run(program))
import torch.distributed.elastic.agent.server.api
for name, heavy in not_loaded.items():
    if "torch" not in heavy:
        alone(name, lambda: load(name))
for program, heavy in programs.items():
    if "torch" not in heavy:
        alone(program, lambda: run(program))
alone("packages", places)
"""


def imports_within(command: str) -> str:
    """Return a program that imports a command's module, and all that its functions import."""
    module = Path(firecaffe.__file__).parent / "cli" / f"{command}.py"
    tree = ast.parse(module.read_text("utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    imports = [
        ast.unparse(node)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert imports, command
    return "\n".join([f"import firecaffe.cli.{command}", *imports])


def test_imports_follow_use(tmp_path: Path) -> None:
    """And a package is where its name says. One Python, for torch is loaded once; a fork each."""
    programs = {
        **{imports_within(name): heavy for name, heavy in NOT_LOADED_TO_RUN.items()},
        RUN: (COMPILER, TESTS, METRICS, CODER),
        PLAN: (TRAINS, *RANKS, COMPILER, TESTS, METRICS, CODER),
    }
    asked = json.dumps([NOT_LOADED, programs, PACKAGES, str(tmp_path)])
    subprocess.run([sys.executable, "-c", EACH_ALONE, asked], check=True)


@pytest.mark.parametrize("name", ["attach", "comm_hook", "local", "split"])
def test_an_old_name_warns_with_the_new_one(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"firecaffe\.adapt\.\w+") as caught:
        public = getattr(firecaffe, name)
    assert f"firecaffe.adapt.{public.__name__} " in str(caught[0].message)
    assert getattr(firecaffe.adapt, public.__name__) is public
    assert name not in dir(firecaffe)
