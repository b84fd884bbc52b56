"""JSON and TOML by their schemas: what is wrong is told with its file, its line and its word."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest

from firecaffe.errors import RecipeError, RunError
from firecaffe.schema import Amount, Count, parse_toml, read_file, read_rows


class Row(TypedDict):
    step: Count
    took_s: Amount


@dataclass(frozen=True)
class Words:
    name: str
    rates: tuple[float, ...] = ()


def test_a_dictionary_keeps_what_its_schema_does_not_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"step": 3, "took_s": 1, "more": [null]}')
    found = read_file(tmp_path / "a.json", Row, RunError)
    assert dict(found) == {"step": 3, "took_s": 1, "more": [None]}


def test_a_dataclass_is_made(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "x"\nrates = [1, 2.5]')
    found = read_file(tmp_path / "a.toml", Words, RecipeError, parse_toml)
    assert found == Words("x", (1.0, 2.5))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[]", r"\$: expected object, got array"),
        ('{"step": "3", "took_s": 1}', r"\$\.step: expected int, got str, found '3'"),
        ('{"step": true, "took_s": 1}', r"\$\.step: expected int, got bool"),
        ('{"step": -1, "took_s": 1}', r"\$\.step: expected int >= 0, found -1"),
        ('{"step": 1, "took_s": NaN}', "is no JSON"),
        ('{"step": 1, "took_s": 1e400}', "out of range"),
        ('{"step": ' + "9" * 40 + ', "took_s": 1}', r"\$\.step"),
        ('{"took_s": 1}', "missing required field step"),
        ('{"step": 1, "took_s": "\\ud800"}', "is no JSON"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RunError, match=f"a.json: cannot be read .*{words}"):
        read_file(path, Row, RunError)
    path.write_text('{"step": 1, "took_s": 1}\n' + text + "\n")
    if text:
        with pytest.raises(RunError, match=f"line 2: .*{words}"):
            list(read_rows(path, Row))


def test_rows_that_are_there(tmp_path: Path) -> None:
    path, kind = tmp_path / "a.jsonl", dict[str, Any]
    assert list(read_rows(path, kind)) == []
    path.write_text('{"kind": "a"}\n{"kind": "b"}\n{"kind": "b", "cut')
    assert list(read_rows(path, kind)) == [{"kind": "a"}, {"kind": "b"}]
    assert list(read_rows(path, kind, holding=b'"b"')) == [{"kind": "b"}]
