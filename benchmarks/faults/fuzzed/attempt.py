"""One damaged file, read: what came of it, and how much memory it took."""

import random
import resource
import shutil
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.faults.fuzzed.mutations import damage
from benchmarks.faults.fuzzed.reader import Reader
from firecaffe.errors import FirecaffeError

MEMORY_BYTES = 1_000_000_000
"""More than the process has when a reader begins."""
SECONDS = 20
"""A reader that takes longer hangs."""

READ, REFUSED, HANGS = "read", "refused", "hangs"


class Hang(BaseException):
    """A reader that takes too long; nothing catches it as an error."""


@dataclass(frozen=True)
class Outcome:
    """What came of one damaged file."""

    word: str
    """READ, REFUSED, HANGS; or the error that is not ours, and where it was raised."""
    extra_bytes: int
    """Memory at the most, above that before and above what the files hold."""
    traceback: str = ""


class Files:
    """A reader's files as they were made, in memory."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        """folder: a new one, in which they are."""
        self.reader, self.folder = reader, folder
        folder.mkdir(parents=True)
        reader.make(folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self._content = {path: path.read_bytes() for path in paths}
        self._damaged = [path for path in paths if path.match(reader.damaged)]

    def attempt(self, seed: str) -> Outcome:
        """Damages one file, as the seed says, and reads. The files are whole again then."""
        rng = random.Random(seed)
        path = rng.choice(self._damaged)
        try:
            damage(path, self._content[path], rng)
            self.reader.after(self.folder)
            return self._read()
        finally:
            self.mend()

    def read_whole(self) -> Outcome:
        return self._read()

    def mend(self) -> None:
        for path, content in self._content.items():
            is_odd = path.is_symlink() or not path.is_file()
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif is_odd:
                path.unlink(missing_ok=True)
            if is_odd or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def _read(self) -> Outcome:
        held = sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file())
        before = _reset_peak()
        word, trace = READ, ""
        try:
            with little_memory_and_time():
                self.reader.read(self.folder)
        except FirecaffeError as error:
            word = REFUSED if str(error) else "an error of ours without words"
        except Hang:
            word, trace = HANGS, traceback.format_exc()
        except BaseException as error:
            word, trace = _told(error), traceback.format_exc()
        return Outcome(word, max(0, _peak() - before - held), trace)


@contextmanager
def little_memory_and_time() -> Iterator[None]:
    """A block that gets an error if it takes more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))

    def too_long(_: int, __: FrameType | None) -> None:
        raise Hang(f"still reads after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _told(error: BaseException) -> str:
    """An error that is not ours, with the last line of firecaffe's that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "/firecaffe/" in each.filename]
    place = ours[-1] if ours else frames[-1]
    file = place.filename.rpartition("/firecaffe/")[2]
    return f"{type(error).__name__} in {file}:{place.lineno} ({str(error)[:60]!r})"


def _reset_peak() -> int:
    """Bytes that the process has; its peak counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(word: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{word}:"))
