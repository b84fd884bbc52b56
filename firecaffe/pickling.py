"""Serialization of objects for another process, with code of scripts and functions by value."""

import io
from types import CodeType
from typing import Any

import cloudpickle


def packed(value: object) -> bytes:
    """Serialize an object for `pickle.loads`.

    Code of `__main__` (a script's or notebook's classes) or of a function goes by value, code of a
    module by name. Code keeps its file name, so tracebacks in the other process show its lines.
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
