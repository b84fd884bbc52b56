"""The package's own names: none hides a package, and each package is where its name says."""

import pkgutil
import subprocess
import sys

import pytest

import firecaffe

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
