"""Would the tests notice? Faults planted in the product one at a time, and the tests of their area.

    python -m benchmarks.planted_faults                     # an hour on two cores
    python -m benchmarks.planted_faults --tree OTHER_TREE   # under another tree's tests

Each fault of planted_faults.toml is put into a copy of the tree's tracked files; then the tests of
its area run until the first that fails. Found: a test failed, or the tests hung. A fault whose text
is not there exactly once is an error, and so is an area that fails without any fault.

Source: DeMillo, Lipton, Sayward 1978 (mutation testing); these mutants are picked by hand, from the
product alone, as mistakes that a person could make.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
HANGS_S = 3600.0
"""The longest area takes minutes."""


@dataclass(frozen=True)
class Fault:
    """A block of the table: in `file`, `old` becomes `new`. tests: pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What the tests of an area made of a fault."""

    is_found: bool
    by: str
    """The first test that failed; empty where none did."""
    seconds: float


def faults() -> list[Fault]:
    """All of the table. Raises: KeyError where a block names no area that there is."""
    words = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    areas = words["areas"]
    return [
        Fault(name, each["file"], each["old"], each["new"], tuple(areas[each["area"]]))
        for name, each in words["faults"].items()
    ]


def plant(fault: Fault, tree: Path) -> None:
    """Raises: ValueError where the text is not there exactly once."""
    path = tree / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: its text is {text.count(fault.old)} times in {fault.file}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


@contextmanager
def copy_of(tree: Path) -> Iterator[Path]:
    """The tracked files, as they are now, in a temporary folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="firecaffe-planted-") as name:
        for file in listed.stdout.rstrip("\0").split("\0"):
            target = Path(name) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / file, target, follow_symlinks=False)  # `recipes` is a link
        yield Path(name)


def run_tests(tree: Path, tests: tuple[str, ...]) -> Outcome:
    """Raises: RuntimeError where pytest could not run the tests."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            return Outcome(True, f"no end in {HANGS_S:.0f} s", time.monotonic() - start)
        finally:
            # Ranks that the first failure has left behind go too.
            os.killpg(process.pid, signal.SIGKILL) if _lives(process.pid) else None
            process.wait()
        output.seek(0)
        said = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if code not in (0, 1, 2) or (code and not failed):
        raise RuntimeError(f"pytest ended with {code}:\n{said[-2000:]}")
    return Outcome(code != 0, failed[1] if failed else "", time.monotonic() - start)


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose product and tests")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults; all by default")
    parser.add_argument("--no-control", action="store_true", help="do not run without a fault")
    options = parser.parse_args()
    chosen = [each for each in faults() if not options.only or each.name in options.only]
    with copy_of(options.tree) as tree:
        for each in chosen:  # all texts before the first minute is spent
            before = (tree / each.file).read_text(encoding="utf-8")
            plant(each, tree)
            (tree / each.file).write_text(before, encoding="utf-8")
        for tests in {} if options.no_control else dict.fromkeys(each.tests for each in chosen):
            outcome = run_tests(tree, tests)
            print(f"control  {outcome.seconds:6.1f} s  {' '.join(tests)}", flush=True)
            if outcome.is_found:
                print(f"fails without a fault: {outcome.by}")
                return 1
        found = 0
        for each in chosen:
            before = (tree / each.file).read_text(encoding="utf-8")
            plant(each, tree)
            outcome = run_tests(tree, each.tests)
            (tree / each.file).write_text(before, encoding="utf-8")
            found += outcome.is_found
            said = f"found by {outcome.by}" if outcome.is_found else "NOT FOUND"
            print(f"{each.name:28} {outcome.seconds:6.1f} s  {said}", flush=True)
    print(f"{found} of {len(chosen)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
