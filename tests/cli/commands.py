"""Commands as a user types them, called in this process, which has loaded torch already."""

import json
from typing import Any

import pytest

from firecaffe.cli import main

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *words: object) -> str:
    """What a command that ends well prints."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def evaluated(capsys: Capture, *words: object) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(shown(capsys, "evaluate", *words, "--json"))
    return row


def refused(capsys: Capture, code: int, *words: object) -> str:
    """The one line that a command says as it ends with this code."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    return line
