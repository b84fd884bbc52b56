"""Objects for another process, with what is of `__main__`, or of a function, by value."""

import io
from types import CodeType
from typing import Any

import cloudpickle


def packed(value: object) -> bytes:
    """By value what is of `__main__`, as a script's or a notebook's classes; by name what a module
    has. `pickle.loads` reads it.

    Code keeps the name of its file, so that tracebacks of another process show its lines.
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
    """cloudpickle from 3.1.3 on calls every file "<dynamic-code>"."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduce_code})
