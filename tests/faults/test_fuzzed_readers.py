"""Whatever is read from elsewhere is read or refused: never a crash, a hang or all memory.

The same readers and the same damage as `python -m benchmarks.faults.fuzz`, a few each.
"""

from pathlib import Path

import pytest

from benchmarks.faults.fuzzed.attempt import READ, REFUSED, Files, little_memory_and_time
from benchmarks.faults.fuzzed.readers import READERS
from benchmarks.faults.fuzzed.records import digest_anew
from firecaffe.errors import FirecaffeError
from firecaffe.training import checkpoint as checkpoints

MUTATIONS = 100
DEAR = {"replay": 5, "load": 20, "recipe": 20, "compare": 40, "prototxt, layers": 40}
DEAR |= dict.fromkeys(("prototxt, a net", "prototxt, a solver"), 20)
DEAR |= dict.fromkeys(("explain", "explain, with a server", "explain, a trace"), 40)
"""Readers that take long, and their mutations."""
MAX_BYTES = 64_000_000
"""Above what the files hold."""


@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_is_read_or_refused(tmp_path: Path, name: str) -> None:
    files = Files(READERS[name], tmp_path / "files")
    whole = files.read_whole()
    assert whole.word == READ, whole.traceback
    for number in range(DEAR.get(name, MUTATIONS)):
        outcome = files.attempt(f"{name} 0 {number}")
        assert outcome.word in (READ, REFUSED), f"--only {number}: {outcome.traceback}"
        assert outcome.extra_bytes < MAX_BYTES, f"--only {number}"


@pytest.mark.parametrize("name", ["compare", "recipe", "checkpoint, new digests"])
@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 100_000, b" " * 17_000_000])
def test_a_file_that_nests_too_deep_or_is_too_long(
    tmp_path: Path, name: str, content: bytes
) -> None:
    READERS[name].make(tmp_path)
    names = ("result.json", "recipe.toml", checkpoints.META)
    next(path for path in tmp_path.rglob("*") if path.name in names).write_bytes(content)
    digest_anew(tmp_path)
    with little_memory_and_time(), pytest.raises(FirecaffeError):
        READERS[name].read(tmp_path)
