"""A small recipe, and the one line that a mistake in it is told in."""

from tests.typed import in_process

GOOD = """
[data]
name = "generated"
[train]
global_batch_size = 8
micro_batch_size = 2
steps = 1
"""
INT8 = ["--exchange.compressor", "int8"]
PAIRS = ["--exchange.compressor_level", "1"]


def error_of(arguments: list[str]) -> tuple[int, str]:
    """The exit code and the one line on stderr."""
    done = in_process(*arguments)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("firecaffe: ")
    return done.returncode, lines[0]
