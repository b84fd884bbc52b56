"""A user's own code, by the name that a recipe has for it.

`package.module:function` is imported, from the current folder too if it is installed nowhere;
`path/file.py:function` is
imported as Python runs a script, so that its neighbours can be imported by it. A class will do for
a function, and `module:object.member` for what lies deeper.

A name that a run's folder or a file brings with it is `Untrusted`: nothing is imported for it.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from firecaffe.errors import OwnCodeError, RecipeError

REFERENCES = ("model.name", "data.name", "task.name", "solver.type")
"""The words of a recipe that may name a user's code."""

MOST_SHOWN = 80
"""Signs of what was found, in a line about it."""


CAFFE = "caffe:"
"""What stands before the path of a prototxt. It says a network, its data or its losses."""


class Untrusted(str):
    """A name that was found in a folder or a file. That is data, which whoever has made it may have
    sent: it names no code that runs, unless the user names it again or trusts it by a word.
    """

    where: str
    """The folder or the file."""

    def __new__(cls, name: str, where: str) -> Self:
        made = super().__new__(cls, name)
        made.where = where
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """For pickles and copies."""
        return str(self), self.where


def check_trusted(word: str, name: str) -> None:
    """Raises: RecipeError for a name of code that comes from a folder or a file alone."""
    if isinstance(name, Untrusted):
        raise RecipeError(
            f"{name.where}: {word} is {str(name)!r}, code that is not firecaffe's, and no folder "
            f"or file alone may run code; if you trust it, name it again: --{word} {name}, or say "
            "--trust-code (in Python model=…, or trust_code=True)"
        )


def is_reference(name: str) -> bool:
    """Whether a name is that of a user's own code."""
    return ":" in name and not is_caffe(name)


def is_caffe(name: str) -> bool:
    """Whether a name is that of a file of Caffe's, caffe:PATH."""
    return name.startswith(CAFFE)


def caffe_file(word: str, name: str) -> Path:
    """The prototxt of caffe:PATH, which a recipe's `word` names. Raises: RecipeError if there is
    none.
    """
    path = Path(name.removeprefix(CAFFE)).expanduser()
    if not path.is_file():
        raise RecipeError(f"{word} is {name!r}, but there is no file {path.absolute()}")
    return path


def with_file(name: str, change: Callable[[str], str]) -> str:
    """`path/file.py:function` or `caffe:path/file` with another path to the file; other names as
    they are.
    """
    if is_caffe(name):
        return CAFFE + change(name.removeprefix(CAFFE))
    place, colon, member = name.partition(":")
    if not colon or not place.endswith(".py"):
        return name
    changed = f"{change(place)}:{member}"
    return Untrusted(changed, name.where) if isinstance(name, Untrusted) else changed


def without_folder(name: str) -> str:
    """`file.py:function` of `path/file.py:function`: the same wherever the file lies."""
    return with_file(name, os.path.basename)


def wherever(word: str, value: Any) -> Any:
    """The value of a recipe's word, without the folder of the file that it names: a run's own
    recipe has paths from the root, and may have been moved.
    """
    if word == "model.weights" and isinstance(value, str):
        return os.path.basename(value)
    return without_folder(value) if word in REFERENCES and isinstance(value, str) else value


def find(word: str, name: str) -> Callable[..., Any]:
    """What a recipe's `word` names.

    Raises: RecipeError if it is not trusted, is not there or cannot be called; OwnCodeError if its
    module fails.
    """
    check_trusted(word, name)
    place, _, member = name.partition(":")
    if not place or not member:
        raise RecipeError(
            f"{word} is {name!r}; expected package.module:function or path/file.py:function"
        )
    module = _from_file(word, name, Path(place)) if place.endswith(".py") else _named(word, name)
    try:
        found = reduce(getattr, member.split("."), module)
    except AttributeError:
        public = [each for each in vars(module) if not each.startswith("_")]
        raise RecipeError(
            f"{word} is {name!r}, but {place} has no {member!r}; it has {_list(public)}"
        ) from None
    if not callable(found):
        raise RecipeError(f"{word} {name!r} is {shown(found)}; expected a function or a class")
    return found


def call(word: str, name: str, function: Callable[..., Any], words: Mapping[str, Any]) -> Any:
    """What it returns for these arguments.

    Raises: RecipeError if it does not take them; OwnCodeError for what it raises.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        signature = None
    try:
        if signature is not None:
            signature.bind(**words)
    except TypeError as error:
        raise RecipeError(
            f"{word} {name!r} is called with {_arguments(words)}, but takes {signature}: {error}"
        ) from None
    try:
        return function(**words)
    except RecipeError:
        raise
    except Exception as error:
        raise failed(f"{word} {name!r}", error) from error


def failed(what: str, error: Exception) -> OwnCodeError:
    """The line about a user's code that has raised; to be raised from the error itself."""
    said = " ".join(str(error).split())
    return OwnCodeError(f"{what} raised {type(error).__name__}{said and ': '}{said:.300}")


def file_digest(path: Path) -> str:
    """The sha256 of a file that a recipe names."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def look_here() -> None:
    """Lets modules that a user names be in the current folder. It comes last: a random.py there is
    not taken for the library's.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def source_digest(function: Callable[..., Any]) -> str:
    """The sha256 of the file that a function is from; empty if it has none."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
        return file_digest(Path(path or ""))
    except (TypeError, OSError):
        return ""


def shown(value: Any) -> str:
    """A value in a line about it."""
    words = " ".join(repr(value).split())
    return words if len(words) <= MOST_SHOWN else f"{words[:MOST_SHOWN]}…"


def _named(word: str, name: str) -> ModuleType:
    module = name.partition(":")[0]
    look_here()
    try:
        is_there = module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that is not there, or is no package
        is_there = False
    except Exception as error:  # a parent that fails
        raise failed(f"{word} {name!r}: importing {module}", error) from error
    if not is_there:
        raise RecipeError(
            f"{word} is {name!r}, but there is no module {module} to import, neither installed nor "
            f"in {os.getcwd()}"
        )
    return _import(word, name, module)


def _from_file(word: str, name: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise RecipeError(f"{word} is {name!r}, but there is no file {path}")
    if not path.stem.isidentifier():
        raise RecipeError(
            f"{word} is {name!r}; a file that is imported has letters, digits and _ in its name"
        )
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = _import(word, name, path.stem)
    found = getattr(module, "__file__", None)
    if found is None or not path.samefile(found):
        raise RecipeError(
            f"{word} is {name!r}, but another module is called {path.stem} ({found or 'built in'});"
            " give the file another name"
        )
    return module


def _import(word: str, name: str, module: str) -> ModuleType:
    try:
        return import_module(module)
    except Exception as error:
        raise failed(f"{word} {name!r}: importing {module}", error) from error


def _list(names: list[str]) -> str:
    return f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}" if names else "nothing public"


def _arguments(words: Mapping[str, Any]) -> str:
    return ", ".join(f"{each}={value!r}" for each, value in words.items()) or "no arguments"
