"""What is wrong is said in one line that names it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(kind: type[Exception], parts: list[str]) -> Iterator[Any]:
    """That the block raises this kind of error, in one line that has all of the parts."""
    with pytest.raises(kind) as caught:
        yield caught
    line = str(caught.value)
    assert len(line.splitlines()) == 1, line
    assert [part for part in parts if part not in line] == [], line
