"""Environment variables that a block sets, and that are then as they were."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variables_kept(*names: str) -> Iterator[None]:
    """Restore environment variables after the block, whether it returns or raises."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
