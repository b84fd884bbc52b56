"""Which ranks of a run hold one model together, by the run's recipe."""

import json
from pathlib import Path
from typing import Any

import pytest

from firecaffe.runs.rank_shares import row_of
from firecaffe.runs.run_folder import RECIPE

SPLIT = {"head": "neurons"}


@pytest.mark.parametrize(
    ("words", "size", "at_a_time"),
    [
        ({}, 1, 1),
        ({"model": 3, "split": SPLIT}, 3, 1),
        ({"model": 2, "scheme": "one_weird_trick"}, 2, 2),
        ({"stages": ["a", "b"]}, 3, 1),
        ({"stages": ["a", "b"], "model": 3}, 3, 1),
        ({"stages": ["a", "b"], "model": 2, "split": SPLIT}, 6, 1),
    ],
)
def test_a_row(tmp_path: Path, words: dict[str, Any], size: int, at_a_time: int) -> None:
    lines = [f"{word} = {json.dumps(value)}" for word, value in words.items() if word != "split"]
    lines += ['split = { head = "neurons" }'] if "split" in words else []
    (tmp_path / RECIPE).write_text("\n".join(["[parallel]", *lines]))
    found = row_of(tmp_path)
    assert (found.size, found.at_a_time) == (size, at_a_time)
