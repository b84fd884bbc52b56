"""What a typed Python starts is what it would start anywhere."""

from tests.typed import python

STARTS = """
import subprocess, sys
told = ["-c", "import sys; print(*sys.argv, sys.flags.isolated)", "x"]
for words in (["-I", "-S"], ["-P"]):
    print(subprocess.check_output([sys.executable, *words, *told], text=True), end="")
"""


def test_an_isolated_python_is_one() -> None:
    """As the process is that beats beside a rank."""
    done = python("-c", STARTS)
    assert done.stdout.splitlines() == ["-c x 1", "-c x 0"], done.stderr
