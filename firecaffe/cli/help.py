"""The text of `--help` and `firecaffe help`: a command's options, or a section of a recipe."""

import dataclasses
import inspect
import shutil
import textwrap
from importlib import import_module

from docstring_parser import parse as parse_docstring

from firecaffe.cli import MODULES
from firecaffe.cli.arguments import Parser, did_you_mean
from firecaffe.cli.bench import PARTS as BENCH_PARTS
from firecaffe.errors import RecipeError
from firecaffe.recipe.refusals import REFUSALS
from firecaffe.recipe.sections import Recipe

PARTS = {"bench": BENCH_PARTS}


def help_text(words: list[str], is_asked: bool) -> str:
    """Return the help of a command; `words` are its name and what follows.

    If `is_asked`, by `firecaffe help`, a section may follow. Raises RecipeError for an unknown one.
    """
    command, *rest = words
    if command in PARTS:
        if not rest or rest[0] not in PARTS[command]:
            rows = "\n".join(f"  firecaffe help {command} {part}" for part in PARTS[command])
            return f"usage: firecaffe {command} {'|'.join(PARTS[command])} …\n\n{rows}"
        command, rest = f"{command}_{rest[0]}", rest[1:]
    command = MODULES.get(command, command)
    parser: Parser = import_module(f"firecaffe.cli.{command}").make_parser()
    if is_asked and rest:
        if not parser.takes_recipe:
            raise RecipeError(f"{parser.command} takes no recipe, so it has no section {rest[0]!r}")
        return section_help(rest[0])
    text = parser.format_help()
    if parser.takes_recipe:
        sections = ", ".join(SECTIONS)
        text += "\n" + textwrap.fill(
            "Every word of a recipe is an option too, as --train.seed 2. "
            f"`firecaffe help {parser.command} SECTION` lists those of a section: {sections}.",
            _width(),
        )
    return text


SECTIONS: dict[str, type] = {
    field.name: field.default_factory  # type: ignore[misc]
    for field in dataclasses.fields(Recipe)
}


def section_help(name: str) -> str:
    """Return the help of a recipe's section. Raises RecipeError if there is no such section."""
    if name not in SECTIONS:
        known = ", ".join(SECTIONS)
        raise RecipeError(
            f"a recipe has no section {name!r}; there are {known}{did_you_mean(name, SECTIONS)}"
        )
    config = SECTIONS[name]
    documented = parse_docstring(inspect.getdoc(config) or "")
    meanings = {field.arg_name: field.description or "" for field in documented.params}
    lines = [f"[{name}] {documented.short_description}", ""]
    for word, default in vars(config()).items():
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        text = " ".join(meanings[word].split())
        lines.append(f"  --{name}.{word}" + (f" (default: {shown})" if shown else ""))
        lines.append(textwrap.indent(textwrap.fill(text, _width() - 8), " " * 8))
        lines += _refusals_of(f"{name}.{word}")
    return "\n".join(lines)


def _refusals_of(word: str) -> list[str]:
    own = " " * 8
    return [
        textwrap.fill(
            row.text_of(word), _width(), initial_indent=f"{own}- ", subsequent_indent=f"{own}  "
        )
        for row in REFUSALS
        if word in row.subjects
    ]


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)
