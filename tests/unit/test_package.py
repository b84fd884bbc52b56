"""The package's own names: none hides a package, and each package is where its name says."""

import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import firecaffe
import firecaffe.data
import firecaffe.models

PACKAGES = [
    each.name for each in pkgutil.walk_packages(firecaffe.__path__, "firecaffe.") if each.ispkg
]


@pytest.mark.parametrize("name", firecaffe.__all__)
def test_a_name_hides_no_package(name: str) -> None:
    """`firecaffe.train` was a function and a package: each took the other's place."""
    assert getattr(firecaffe, name) is not None
    assert f"firecaffe.{name}" not in PACKAGES


def test_a_package_is_where_its_name_says() -> None:
    program = f"""
import importlib, operator
import firecaffe.training.loop
for name in {PACKAGES!r}:
    module = importlib.import_module(name)
    assert operator.attrgetter(name.removeprefix("firecaffe."))(firecaffe) is module, name
assert firecaffe.training.loop.Training and callable(firecaffe.train)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("package", [firecaffe.data, firecaffe.models])
def test_a_name_that_is_imported_when_asked_for_hides_no_module(package: ModuleType) -> None:
    """Once the module `hold_out` is imported, it would stand where the function `hold_out` was."""
    modules = {each.name for each in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_the_words_of_a_recipe_need_no_torch() -> None:
    program = (
        "import sys, firecaffe.recipe.sections; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_training_loads_the_coder_of_small_files() -> None:
    """`constriction` is for who reads or writes a .fcz file."""
    program = """
import sys
import firecaffe.cli.plan, firecaffe.cli.train, firecaffe.cli.verify
assert "constriction" not in sys.modules
import firecaffe.compression.fcz
assert "constriction" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
