"""The package's own names: none hides a package, and none loads what it does not use."""

import ast
import json
import pkgutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import firecaffe
import firecaffe.data
import firecaffe.models
from firecaffe.cli import COMMANDS, SHARED
from firecaffe.cli.bench import PARTS
from firecaffe.meta_kernels import NAME, without_compiler

PACKAGES = [
    each.name for each in pkgutil.walk_packages(firecaffe.__path__, "firecaffe.") if each.ispkg
]


def test_a_name_hides_no_package() -> None:
    """`firecaffe.train` was a function and a package: each took the other's place."""
    assert all(getattr(firecaffe, name) is not None for name in firecaffe.__all__)
    assert not {f"firecaffe.{name}" for name in firecaffe.__all__} & set(PACKAGES)


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
COMPILER, TESTS, METRICS, CODER = "torch._dynamo", "scipy.stats", "torchmetrics", "constriction"
HEAVY = (COMPILER, TESTS, METRICS)
RANKS = (
    *("firecaffe.cluster.groups", "firecaffe.cluster.world", "firecaffe.cluster.launcher"),
    "firecaffe.transport",
)

OPTIONS = {
    f"firecaffe.cli.{SHARED.get(name, name)}"
    for name in (*COMMANDS, *(f"bench_{part}" for part in PARTS))
}
"""Modules of commands, each with its options, of which help is made."""

NOT_LOADED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("firecaffe.recipe.sections", "firecaffe.cli.help", *OPTIONS), ("torch", "numpy")
    ),
    "firecaffe.cli.train": ("torch", "firecaffe.cli.arguments", "jsonargparse"),
    "firecaffe.cli.start_training": (TRAINS, *HEAVY, CODER),
    TRAINS: ("jsonargparse", "firecaffe.cluster.launcher", *HEAVY, CODER),
    **dict.fromkeys(
        (f"firecaffe.script.{name}" for name in ("launch", "attach", "split", "ddp")),
        (TRAINS, *HEAVY),
    ),
}
"""What a module does not load until it is used, for it takes long: a second, or all that trains."""

NOT_LOADED_TO_RUN: dict[str, tuple[str, ...]] = {
    "compare": ("torch", TESTS),
    "same_bits": (*HEAVY, CODER),
    **dict.fromkeys(("tune", "check", "compress", "bench"), HEAVY),
    "trained_network": (TRAINS, *HEAVY),
    **dict.fromkeys(("profile", "import_and_pack"), (TRAINS, *HEAVY, CODER)),
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
main(["--model", "lenet", "--cluster", "dgx-a100", "--workers", "1,2,16"])
main(["nin_small", "--workers", "1,2"])
assert not dist.is_initialized()
"""
"""A whole plan, which starts no process."""

SHAPES = """
import gc, sys, torch
from firecaffe.models import build_model
from firecaffe.meta_kernels import on_meta
from firecaffe.models.layer_costs import profile

with on_meta():
    network = build_model("googlenet")
    torch.nn.init.normal_(next(network.parameters()), generator=None)
    torch.nn.init.uniform_(tensor=next(network.parameters()))
assert "sympy" not in sys.modules
in_memory = torch.empty(3)
with on_meta():
    torch.nn.init.uniform_(in_memory, 1, 2)
assert in_memory.min() >= 1
profile(network, (3, 224, 224), 2)
assert "torch._dynamo" not in sys.modules
words = (getattr(each, "__dict__", ()) for each in gc.get_objects())
assert not [each for each in words if "__dynamo_disable" in each]
double = torch.compile(lambda x: x + x, backend="eager")
assert double(torch.ones(2)).tolist() == [2, 2]
assert torch._dynamo.utils.counters["stats"]["calls_captured"] == 1
"""
"""Shapes do not load torch's compiler, and it compiles afterwards."""

ASKED_FOR_MORE = """
import sys
from firecaffe.meta_kernels import NAME, without_compiler

with without_compiler():
    stand_in = sys.modules[NAME]
    stand_in.graph_break()
    assert stand_in.disable(without_compiler, wrapping=False) is without_compiler
    assert not hasattr(stand_in, "__file__")  # as `inspect.getmodule` asks of every module
    assert sys.modules[NAME] is stand_in
    assert stand_in.is_compiling() is False
    compiler = sys.modules[NAME]
    assert compiler is not stand_in
assert sys.modules[NAME] is compiler
"""

PLACES = """
import importlib, operator
import firecaffe, firecaffe.training.loop

for name in packages:
    module = importlib.import_module(name)
    assert operator.attrgetter(name.removeprefix("firecaffe."))(firecaffe) is module, name
assert firecaffe.training.loop.Training and callable(firecaffe.train)
"""
"""A package is where its name says."""

IN_FORKS = """
import json, os, sys
groups, alone, words = json.loads(sys.argv[1])

def forked(programs, heavy):
    if (child := os.fork()) == 0:
        for program in programs:
            exec(program, dict(words))
            loaded = set(heavy) & set(sys.modules)
            assert not loaded, (program, loaded)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, programs

for heavy, programs in groups:
    if "torch" in heavy:
        forked(programs, heavy)
import torch
for program in alone:
    forked([program], [])
import torch.distributed.elastic.agent.server.api
for heavy, programs in groups:
    if "torch" not in heavy:
        forked(programs, heavy)
"""


def imports_within(command: str) -> str:
    """Return a program that imports a module of commands, and all that its functions import."""
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
    """One Python, for torch is loaded once; a fork for all that leave the same modules out."""
    programs = {
        **{f"import {name}": heavy for name, heavy in NOT_LOADED.items()},
        **{imports_within(name): heavy for name, heavy in NOT_LOADED_TO_RUN.items()},
        RUN: (*HEAVY, CODER),
        PLAN: (TRAINS, *RANKS, *HEAVY, CODER),
    }
    groups = defaultdict[tuple[str, ...], list[str]](list)
    for program, heavy in programs.items():
        groups[heavy].append(program)
    words = {"packages": PACKAGES, "folder": str(tmp_path)}
    asked = json.dumps([[*groups.items()], [SHAPES, ASKED_FOR_MORE, PLACES], words])
    subprocess.run([sys.executable, "-c", IN_FORKS, asked], check=True)


def test_a_compiler_that_is_loaded_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, loaded)
    with without_compiler():
        assert sys.modules[NAME] is loaded
    assert sys.modules[NAME] is loaded


@pytest.mark.parametrize("name", ["attach", "comm_hook", "local", "split"])
def test_an_old_name_warns_with_the_new_one(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"firecaffe\.adapt\.\w+") as caught:
        public = getattr(firecaffe, name)
    assert f"firecaffe.adapt.{public.__name__} " in str(caught[0].message)
    assert getattr(firecaffe.adapt, public.__name__) is public
    assert name not in dir(firecaffe)
