"""Whose code a printed traceback shows."""

import re

from firecaffe.errors import Owner, whose

FILE = re.compile(r'^\s*File "(.+)", line \d+', re.MULTILINE)


def owners(traceback: str) -> set[Owner]:
    """The owners of the files that it names."""
    return {whose(file) for file in FILE.findall(traceback)}
