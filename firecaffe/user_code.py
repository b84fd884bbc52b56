"""User code that a recipe names, and the serialization of its objects for another process.

`package.module:function` is imported, from the current folder too. `path/file.py:function` is
imported like a script, so it can import its neighbours. A class may replace a function, and
`module:object.member` names a member. A name that comes with a run folder or a file is `Untrusted`,
and nothing is imported for it.
"""

import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Self

import cloudpickle

from firecaffe.errors import FirecaffeError, OwnCodeError, RecipeError
from firecaffe.files import sha256_of

REFERENCES = ("model.name", "data.name", "task.name", "solver.type")
"""Fields of a recipe that may name user code."""

MAX_SHOWN = 80


CAFFE = "caffe:"
"""The prefix of a prototxt's path, which gives a network, its data or its losses."""


class Untrusted(str):
    """A name from a file of unknown origin: its code runs only if the user names or trusts it."""

    where: str

    def __new__(cls, name: str, where: str) -> Self:
        made = super().__new__(cls, name)
        made.where = where
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.where


def check_trusted(word: str, name: str) -> None:
    """Raise RecipeError if a name of code comes only from a folder or a file."""
    if isinstance(name, Untrusted):
        raise RecipeError(
            f"{name.where}: {word} is {str(name)!r}, code that is not firecaffe's, and no folder "
            f"or file alone may run code; if you trust it, name it again: --{word} {name}, or say "
            "--trust-code (in Python trust_code=True)"
        )


def is_reference(name: str) -> bool:
    return ":" in name and not is_caffe(name)


def is_caffe(name: str) -> bool:
    return name.startswith(CAFFE)


def caffe_file(word: str, name: str) -> Path:
    """Return the path of `caffe:PATH`, the value of `word`. Raises RecipeError if it is no file."""
    path = Path(name.removeprefix(CAFFE)).expanduser()
    if not path.is_file():
        raise RecipeError(f"{word} is {name!r}, but there is no file {path.absolute()}")
    return path


def with_file(name: str, change: Callable[[str], str]) -> str:
    """Change the path in `path/file.py:function` or `caffe:path/file`; return other names as is."""
    if is_caffe(name):
        return CAFFE + change(name.removeprefix(CAFFE))
    place, colon, member = name.partition(":")
    if not colon or not place.endswith(".py"):
        return name
    changed = f"{change(place)}:{member}"
    return Untrusted(changed, name.where) if isinstance(name, Untrusted) else changed


def without_folder(name: str) -> str:
    """Return `path/file.py:function` as `file.py:function`, equal wherever the file lies."""
    return with_file(name, os.path.basename)


def wherever(word: str, value: Any) -> Any:
    """Return a field's value without its file's folder, because a run may have been moved."""
    if word == "model.weights" and isinstance(value, str):
        return os.path.basename(value)
    return without_folder(value) if word in REFERENCES and isinstance(value, str) else value


def find(word: str, name: str) -> Callable[..., Any]:
    """Import the function or class `name`, the value of a recipe's field `word`.

    Raises RecipeError if it is untrusted, absent or not callable; OwnCodeError if its module fails.
    """
    check_trusted(word, name)
    place, _, member = name.partition(":")
    if not place or not member:
        raise RecipeError(
            f"{word} is {name!r}; expected package.module:function or path/file.py:function"
        )
    module = _from_file(word, name, Path(place)) if place.endswith(".py") else _named(word, name)
    try:
        imported = reduce(getattr, member.split("."), module)
    except AttributeError:
        public = [var for var in vars(module) if not var.startswith("_")]
        raise RecipeError(
            f"{word} is {name!r}, but {place} has no {member!r}; it has {_list(public)}"
        ) from None
    if not callable(imported):
        raise RecipeError(f"{word} {name!r} is {shown(imported)}; expected a function or a class")
    return imported


def call(word: str, name: str, function: Callable[..., Any], words: Mapping[str, Any]) -> Any:
    """Call user code. Raises RecipeError if `words` do not fit it; OwnCodeError for its errors."""
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
    """Return the error for user code that raised, to be raised from its error."""
    said = " ".join(str(error).split())
    return OwnCodeError(f"{what} raised {type(error).__name__}{said and ': '}{said:.300}")


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Name `what` in the errors of a block that calls user code; firecaffe's own pass as they are.

    Raises: OwnCodeError.
    """
    try:
        yield
    except FirecaffeError:
        raise
    except Exception as error:
        raise failed(what, error) from error


def search_cwd() -> None:
    """Append the current folder to `sys.path`: a random.py there must not hide the library's."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def source_digest(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of the file that defines a function; empty if it has none."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
        return sha256_of(Path(path or ""))
    except (TypeError, OSError):
        return ""


def shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _named(word: str, name: str) -> ModuleType:
    module = name.partition(":")[0]
    search_cwd()
    try:
        is_there = module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):  # a parent is absent, or not a package
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
    file = getattr(module, "__file__", None)
    if file is None or not path.samefile(file):
        raise RecipeError(
            f"{word} is {name!r}, but another module is called {path.stem} ({file or 'built in'});"
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


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no arguments"


def packed(value: object) -> bytes:
    """Serialize an object for `pickle.loads`.

    Code in `__main__` (a script's or notebook's classes) or in a function is sent by value, code in
    a module by name. Code keeps its file name, so tracebacks in the other process show its lines.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _code_of_file(make: Any, arguments: tuple[Any, ...], file: str) -> CodeType:
    code: CodeType = make(*arguments)
    return code.replace(co_filename=file)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code_of_file, (make, arguments, code.co_filename)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that keeps file names; cloudpickle from 3.1.3 on writes "<dynamic-code>"."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduce_code})
