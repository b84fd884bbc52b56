"""The text of `--help` and `firecaffe help`: a command's options, or a section of a recipe."""

import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator

from docstring_parser import parse as parse_docstring

from firecaffe.cli import COMMANDS, function_of
from firecaffe.cli.arguments import Parser
from firecaffe.cli.bench import PARTS as BENCH_PARTS
from firecaffe.errors import RecipeError
from firecaffe.recipe.refusals import REFUSALS
from firecaffe.recipe.sections import Recipe
from firecaffe.value_checks import did_you_mean

PARTS = {"bench": BENCH_PARTS}


def help_text(words: list[str], is_asked: bool) -> str:
    """Return the help of a command; `words` are its name and the arguments after it.

    `is_asked`: by `firecaffe help`; then a section may follow. Raises RecipeError if it is unknown.
    """
    command, *rest = words
    if command not in COMMANDS:  # the section of a recipe
        return section_help(command)
    if command in PARTS:
        if not rest or rest[0] not in PARTS[command]:
            rows = "\n".join(f"  firecaffe help {command} {part}" for part in PARTS[command])
            return f"usage: firecaffe {command} {'|'.join(PARTS[command])} …\n\n{rows}"
        command, rest = f"{command}_{rest[0]}", rest[1:]
    parser: Parser = function_of("make_parser", command)()
    if is_asked and rest:
        if not parser.takes_recipe:
            raise RecipeError(f"{parser.command} takes no recipe, so it has no section {rest[0]!r}")
        return section_help(rest[0])
    text = parser.format_help()
    if parser.notes:
        text += "\nnotes:\n" + "".join(map(_note, parser.notes))
    if parser.takes_recipe:
        sections = ", ".join(SECTIONS)
        text += "\n" + textwrap.fill(
            "Every setting of a recipe is an option as well, for example --train.seed 2. "
            f"`firecaffe help {parser.command} SECTION` lists those of a section: {sections}.",
            _width(),
        )
    return text


def _note(text: str) -> str:
    begin, more = "  - ", " " * 4
    lines = textwrap.wrap(
        text, _width(), initial_indent=begin, subsequent_indent=more, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


SECTIONS: dict[str, type] = {
    field.name: field.default_factory  # type: ignore[misc]
    for field in dataclasses.fields(Recipe)
}


def section_help(name: str) -> str:
    if name not in SECTIONS:
        known = ", ".join(SECTIONS)
        raise RecipeError(
            f"a recipe has no section {name!r}; there are {known}{did_you_mean(name, SECTIONS)}"
        )
    documented = parse_docstring(inspect.getdoc(SECTIONS[name]) or "")
    lines = [f"[{name}] {documented.short_description}", ""]
    for word, default, meaning in settings(name):
        lines.append(f"  --{word}" + (f" (default: {default})" if default else ""))
        lines.append(textwrap.indent(textwrap.fill(meaning, _width() - 8), " " * 8))
        lines += _refusals_of(word)
    return "\n".join(lines)


def settings(section: str) -> Iterator[tuple[str, str, str]]:
    """Yield the settings of a recipe's section: name, default and meaning, as text."""
    config = SECTIONS[section]
    documented = parse_docstring(inspect.getdoc(config) or "")
    meanings = {field.arg_name: field.description or "" for field in documented.params}
    for word, default in vars(config()).items():
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        yield f"{section}.{word}", shown, " ".join(meanings[word].split())


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
