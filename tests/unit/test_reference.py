"""A user's own code by name: found as Python finds it; what is wrong is one line with its word."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.user_code import (
    caffe_file,
    call,
    find,
    is_reference,
    source_digest,
    with_file,
    without_folder,
)
from tests.kit.models_refused import refused

NETS = """
    import beside_nets

    def make(width, depth=2):
        return width, depth, beside_nets.NAME

    class Kept:
        class Inner:
            pass

    NUMBER = 3

    def fail():
        raise KeyError("three\\nlines\\nlong")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with files to import, and no trace of them afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / "own_package"
    for path, text in {
        tmp_path / "lib" / "own_nets.py": NETS,
        tmp_path / "lib" / "beside_nets.py": "NAME = 'beside'",
        tmp_path / "lib" / "json.py": "def make(): pass",
        tmp_path / "lib" / "broken_nets.py": "import there_is_no_such_module",
        tmp_path / "lib" / "with-dash.py": "",
        package / "__init__.py": "",
        package / "nets.py": "def make(): return 'packaged'",
    }.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_is_found_in_a_file_and_in_a_package(folder: Path) -> None:
    made = find("model.name", "lib/own_nets.py:make")
    assert call("model.name", "lib/own_nets.py:make", made, {"width": 4}) == (4, 2, "beside")
    assert find("model.name", "own_package.nets:make")() == "packaged"
    assert find("model.name", "lib/own_nets.py:Kept.Inner").__name__ == "Inner"
    assert find("model.name", "collections:Counter")("aab") == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lib/none.py:make", ["lib/none.py", "no file"]),
        ("lib/with-dash.py:make", ["letters, digits"]),
        ("lib/json.py:make", ["another module is called json"]),
        ("lib/own_nets.py:mak", ["no 'mak'", "make, Kept"]),
        ("lib/own_nets.py:NUMBER", ["is 3", "function or a class"]),
        ("no_such_package.nets:make", ["no module no_such_package.nets"]),
        ("json.nets:make", ["no module json.nets"]),
        ("lib/own_nets.py:", ["package.module:function"]),
        (":make", ["package.module:function"]),
    ],
)
def test_what_is_not_there_is_one_line(folder: Path, name: str, parts: list[str]) -> None:
    with refused(RecipeError, ["model.name", name, *parts]) as caught:
        find("model.name", name)
    assert not isinstance(caught.value, OwnCodeError)


@pytest.mark.parametrize("words", [{}, {"width": 1, "hight": 2}])
def test_arguments_that_it_does_not_take(folder: Path, words: dict[str, int]) -> None:
    name = "lib/own_nets.py:make"
    with pytest.raises(RecipeError, match=r"width, depth=2") as caught:
        call("model.name", name, find("model.name", name), words)
    assert "hight" in str(caught.value) or not words


def test_what_own_code_raises_keeps_its_traceback(folder: Path) -> None:
    with refused(OwnCodeError, ["KeyError: ", "three"]) as caught:
        call("model.name", "own:fail", find("model.name", "lib/own_nets.py:fail"), {})
    lines = caught.value.traceback.splitlines()
    assert str(folder / "lib" / "own_nets.py") in lines[1]
    assert not any("firecaffe/user_code.py" in line for line in lines)
    with pytest.raises(OwnCodeError, match="there_is_no_such_module") as imported:
        find("data.name", "lib/broken_nets.py:make")
    assert "broken_nets.py" in imported.value.traceback


def test_the_digest_is_that_of_its_file(folder: Path) -> None:
    first = source_digest(find("model.name", "lib/own_nets.py:make"))
    assert first == source_digest(find("model.name", "lib/own_nets.py:Kept"))
    assert first != source_digest(find("model.name", "own_package.nets:make"))
    assert source_digest(len) == ""


def test_a_file_of_caffes_is_no_code(tmp_path: Path) -> None:
    assert is_reference("nets:make")
    assert not is_reference("caffe:nets/net.prototxt")
    assert without_folder("caffe:nets/net.prototxt") == "caffe:net.prototxt"
    assert with_file("caffe:net.prototxt", lambda path: f"/{path}") == "caffe:/net.prototxt"
    file = tmp_path / "net.prototxt"
    file.write_text("")
    assert caffe_file("model.name", f"caffe:{file}") == file
    with pytest.raises(RecipeError, match=r"^data\.name is 'caffe:no\.prototxt', but .* /.*/no\."):
        caffe_file("data.name", "caffe:no.prototxt")
