"""about.json: what is written is read, and damage is told with its word."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firecaffe.errors import RunError
from firecaffe.training.run_facts import ABOUT, NOTHING, read_about, write_about

SOME = replace(NOTHING, num_classes=2, class_names=("red", "blue"), sample_CHW=(3, 8, 8))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_about(tmp_path) is None
    write_about(tmp_path, SOME)
    assert read_about(tmp_path) == SOME


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"num_classes": "2"}, r"\$\.num_classes: expected int . null, got str"),
        ({"num_classes": -1}, r"\$\.num_classes: expected int >= 0, found -1"),
        ({"class_names": [1, 2]}, r"\$\.class_names\[0\]: expected str, got int"),
        ({"sample_CHW": [3, 8.5, 8]}, r"\$\.sample_CHW\[1\]: expected int"),
        ({"is_decoded": "no"}, r"\$\.is_decoded: expected bool"),
    ],
)
def test_damage_is_told_with_its_word(words: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_about(tmp_path, SOME)
    row = json.loads((tmp_path / ABOUT).read_text())
    (tmp_path / ABOUT).write_text(json.dumps({**row, **words}))
    with pytest.raises(RunError, match=rf"about.json: .*{said}"):
        read_about(tmp_path)


def test_it_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ABOUT)
    with pytest.raises(RunError, match="no regular file"):
        read_about(tmp_path)
