"""Files that belong together: all receive their final names, or none does."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from firecaffe.files import written_aside


@contextmanager
def written_together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Give temporary paths, and rename all files in this order, or restore the previous ones."""
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_as_before(path))
        asides = [stack.enter_context(written_aside(path)) for path in reversed(paths)]
        yield asides[::-1]


@contextmanager
def _as_before(path: Path) -> Iterator[None]:
    was_there = path.exists()
    before = path.with_name(f".before.{path.name}")
    if path.is_file():
        before.unlink(missing_ok=True)
        try:
            os.link(path, before)
        except OSError:  # a file system without links
            shutil.copy2(path, before)
    try:
        yield
    except BaseException:
        if before.exists():
            os.replace(before, path)
        elif not was_there:
            path.unlink(missing_ok=True)
        raise
    finally:
        before.unlink(missing_ok=True)
