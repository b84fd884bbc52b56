"""docs/reference shows what is public, and nothing of it without a description."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from docstring_parser import parse
from sphinx.pycode import ModuleAnalyzer

import firecaffe

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES = "\n".join(page.read_text() for page in sorted(FOLDER.glob("*.md")))


def shown() -> Iterator[Any]:
    for kind, name in re.findall(r"^\.\. auto(\w+):: ([\w.]+)", PAGES, re.M):
        found = resolve_name(name)
        if kind == "module":
            own = vars(found).values()
            yield from (each for each in own if getattr(each, "__module__", "") == name)
        else:
            yield found


def described(public: Any) -> set[str]:
    """The parameters and fields that have a description, below `Args:` or below the field."""
    words = {each.arg_name for each in parse(inspect.getdoc(public) or "").params}
    fields = ModuleAnalyzer.for_module(public.__module__).find_attr_docs()
    return words | {name for owner, name in fields if owner == public.__qualname__}


def members(public: type) -> set[str]:
    """Its own public fields, methods and properties. A plain constant is none."""
    values = {name: value for name, value in vars(public).items() if not name.startswith("_")}
    constants = {name for name, value in values.items() if isinstance(value, int | str | None)}
    fields = {name for name in inspect.get_annotations(public) if not name.startswith("_")}
    return (set(values) | fields) - constants


@pytest.mark.parametrize(
    "public", [each for each in shown() if inspect.isclass(each)], ids=lambda each: each.__name__
)
def test_each_member_of_a_shown_class_is_described(public: type) -> None:
    """Sphinx leaves out a member without a description, and says nothing."""
    with_docstring = {name for name in vars(public) if inspect.getdoc(getattr(public, name, None))}
    assert members(public) <= with_docstring | described(public)


@pytest.mark.parametrize("name", firecaffe.__all__)
def test_a_public_name_is_shown(name: str) -> None:
    assert any(each is getattr(firecaffe, name) for each in shown())


@pytest.mark.parametrize("name", [each for each in firecaffe.__all__ if not each.endswith("Error")])
def test_each_word_of_a_public_name_is_described(name: str) -> None:
    public = getattr(firecaffe, name)
    words = inspect.signature(public).parameters.values()
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert {word.name for word in words if word.kind not in collected} <= described(public)
