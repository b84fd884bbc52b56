"""Files that belong together: all get their final names, or none does."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from firecaffe.files import written_aside


@contextmanager
def written_together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """A path beside each, as `written_aside` gives it. The files get their names in this order; if
    one cannot, what stood under the names of those before it is there again.
    """
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_as_before(path))
        asides = [stack.enter_context(written_aside(path)) for path in reversed(paths)]
        yield asides[::-1]


@contextmanager
def _as_before(path: Path) -> Iterator[None]:
    """Puts back the file that was there, or that there was none, if the block fails."""
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
