"""What the reference has from code: each maker returns lines of Markdown for a mark on a page.

A page has a mark such as `<!-- commands -->`, and Sphinx puts the maker's lines there (conf.py).
"""

import inspect
import re
import textwrap
from argparse import Action
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import torch

import firecaffe
from firecaffe import errors
from firecaffe.api.answer import Answer
from firecaffe.cli import COMMANDS, INTERRUPTED, function_of
from firecaffe.cli.arguments import Parser
from firecaffe.cli.help import PARTS, SECTIONS, settings
from firecaffe.errors import FirecaffeError
from firecaffe.faults import KINDS, RESTARTS, RESUME_WORD
from firecaffe.models import MODELS, build_model
from firecaffe.models.layer_costs import profile
from firecaffe.recipe.fits import FITS
from firecaffe.recipe.refusals import REFUSALS, num_combinations
from firecaffe.recipe.sections import Recipe, flatten, recipe_path, shipped
from firecaffe.recipe.worker_numbers import WORKERS_FIT

ROOT = Path(__file__).parents[1]


def filled(page: str) -> str:
    """Put the makers' lines in place of a page's marks."""
    return MARK.sub(lambda mark: "\n".join(MAKERS[mark[1]]()), page)


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    headings = list(headings)
    yield "| " + " | ".join(headings) + " |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


MARKUP = re.compile(
    r"(?P<code>`[^`]*`|(?<![\w-])--[a-z][\w.-]*(?:\w|…)|"
    + "|".join(rf"\b{re.escape(word)}\b" for word in sorted(flatten(Recipe()), key=len)[::-1])
    + r")|(?P<page>docs/\w+/\w+\.md)|(?P<sign>[*<]|\b_)"
)


def prose(text: str) -> str:
    """A help text as Markdown: options and settings are code, pages are links."""
    return MARKUP.sub(_marked_up, " ".join(text.split()))


def _marked_up(found: re.Match[str]) -> str:
    if page := found["page"]:
        return f"[{page}](../{page.removeprefix('docs/')})"
    return f"`{found['code'].strip('`')}`" if found["code"] else f"\\{found['sign']}"


# The command line


@cache
def parsers() -> dict[str, Parser]:
    """The parser of every command, by name; of `bench`, one for each of its parts."""
    found = {}
    for command in COMMANDS:
        for part in PARTS.get(command, ("",)):
            name = f"{command}_{part}" if part else command
            found[f"{command} {part}".strip()] = function_of("make_parser", name)()
    return found


def commands() -> Iterator[str]:
    for name, parser in parsers().items():
        yield f"## `firecaffe {name}`\n"
        yield f"{prose(parser.description or '')}\n"
        usage = textwrap.wrap(
            parser.usage or "", 88, subsequent_indent="    ", break_on_hyphens=False
        )
        yield "\n".join(["```text", *usage, "```\n"])
        rows = ((option(action), prose(action.help or "")) for action in options_of(parser))
        yield from table(("option", "meaning"), rows)
        yield ""
        yield from (f"- {prose(note)}" for note in parser.notes)
        called = "import_caffe" if name == "import" else name  # a word of Python's own
        if inspect.isfunction(getattr(firecaffe, called, None)):
            yield f"\nIn Python: {{py:func}}`firecaffe.{called}`"
        yield ""


def options_of(parser: Parser) -> list[Action]:
    """A command's arguments and options, the everyday ones first, without --help."""
    return [action for action in parser.own if action.dest != "help"]


def option(action: Action) -> str:
    """An option or argument with its value, in every spelling."""
    value = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
    count = action.nargs if isinstance(action.nargs, int) else int(action.nargs != "?")
    values = [str(value)] * count + ["…"] * (action.nargs in ("+", "*"))
    spellings = [[name, *values] for name in action.option_strings] or [values]
    return ", ".join(f"`{' '.join(words)}`" for words in spellings)


# The recipe


def recipe() -> Iterator[str]:
    for section, config in SECTIONS.items():
        yield f"## `[{section}]`\n"
        yield (inspect.getdoc(config) or "").partition("\n")[0] + "\n"
        yield from table(
            ("setting", "default", "meaning"),
            (
                (f"`{word}`", f"`{default}`" if default else "", prose(text))
                for word, default, text in settings(section)
            ),
        )
        yield ""


def recipes() -> Iterator[str]:
    files = {name: recipe_path(name).read_text(encoding="utf-8") for name in shipped()}
    yield from table(
        ("recipe", "network", "data", "batch", "most workers", "length"), map(_row_of, files)
    )
    for name, text in files.items():
        about, _, content = text.partition("\n\n[")
        yield f"\n## `{name}`\n"
        for paragraph in re.sub(r"^# ?", "", about, flags=re.M).split("\n\n"):
            first, *points = re.split(r"\n?- ", f"\n{paragraph}".replace("\n- ", "\n\n- "))
            yield f"{prose(first)}\n"
            yield from (f"- {prose(point)}" for point in points)
            yield ""
        yield f"```toml\n[{content}```\n"


def _row_of(name: str) -> tuple[str, ...]:
    own = Recipe.read(name)
    most = 1 if own.synchrony.is_simulated else own.train.num_micro_batches
    length = f"{own.train.steps:,} steps" if own.train.steps else f"{own.train.epochs} epochs"
    batch = f"{own.train.global_batch_size:,}"
    return f"[{name}](#{name})", own.model.name, own.data.name, batch, str(most), length


# Errors


def exit_codes() -> Iterator[str]:
    """A row for each code: of errors of the package, and of faults of a rank."""
    rows = {
        0: ["", "", "The command is done.", ""],
        1: [
            "",
            "",
            "An error that is not foreseen, or of your own code. Its traceback follows.",
            "",
        ],
        INTERRUPTED: ["", "", "The command was interrupted.", ""],
    }
    for name, error in vars(errors).items():
        is_error = inspect.isclass(error) and issubclass(error, FirecaffeError)
        if is_error and "exit_code" in vars(error) and error.exit_code not in rows:
            about = (inspect.getdoc(error) or "").split("\n\n")[0]
            link = f"{{py:exc}}`~firecaffe.errors.{name}`"
            rows[error.exit_code] = [link, "", prose(about), ""]
    for name, kind in KINDS.items():
        row = rows.setdefault(kind.exit_code, ["", "", f"A rank {kind.what}.", ""])
        advice = kind.advice.replace(RESUME_WORD, "--resume")
        row[1] = f"{row[1]}, `{name}`".removeprefix(", ")
        row[3] = prose(advice.replace(RESTARTS, ", or use --max-restarts"))
    codes = [[str(code), *rows[code]] for code in sorted(rows)]
    codes.append(["128 + n", "", "", "Signal n ended the launcher.", ""])
    yield from table(("code", "error", "fault of a rank", "meaning", "advice"), codes)


def refusals() -> Iterator[str]:
    unwritten = sum(row.kind == "unwritten" for row in REFUSALS)
    yield f"{len(REFUSALS)} rows, of which {unwritten} are unwritten;"
    yield f"they come to {num_combinations()} combinations of settings.\n"
    rows = (
        (
            "<br>".join(f"`{term.text}`" for term in row.when),
            row.because,
            row.instead.replace("*", "\\*"),
            row.kind,
        )
        for row in REFUSALS
    )
    yield from table(("these together", "because", "instead", "kind"), rows)


def fits() -> Iterator[str]:
    rows = (
        (
            ", ".join(f"`{word}`" for word in fit.words),
            " ".join((fit.problem.__doc__ or "").split()),
        )
        for fit in (*FITS, *WORKERS_FIT)
    )
    yield from table(("settings", "what fits"), rows)


# Python


def functions() -> Iterator[str]:
    """The functions that are commands (`train` has a page of its own), with their answers."""
    yield "```{eval-rst}"
    places = sorted(firecaffe._PLACES.items())
    for name in (name for name, place in places if place.startswith("api.") and name != "train"):
        yield f".. autofunction:: firecaffe.{name}\n"
        answer = get_type_hints(getattr(firecaffe, name))["return"]
        for kind in get_args(answer) or (answer,):
            if kind is not type(None):
                yield from _class_of(kind, "   :exclude-members: width, least_width")
    yield from _class_of(Answer)
    yield "```"


def _class_of(kind: type, *options: str) -> list[str]:
    return [f".. autoclass:: {kind.__module__}.{kind.__name__}()", "   :members:", *options, ""]


def sections() -> Iterator[str]:
    """The classes of a recipe's sections."""
    yield "```{eval-rst}\n.. autoclass:: firecaffe.Recipe()\n   :members:\n"
    for kind in SECTIONS.values():
        yield f".. autoclass:: firecaffe.{kind.__name__}\n"
    yield "```"


# Networks


def networks() -> Iterator[str]:
    yield from table(
        ("network", "input", "classes", "parameters", "MACs", "weights", "D", "source"),
        map(_counts, MODELS),
    )
    for module in dict.fromkeys(model.build.__module__ for model in MODELS.values()):
        title = (import_module(module).__doc__ or "").partition(":")[0]
        yield f"\n## {title}\n"
        yield f"```{{eval-rst}}\n.. automodule:: {module}\n```"


def _counts(name: str) -> tuple[str, ...]:
    row = MODELS[name]
    with torch.device("meta"):
        volumes = profile(build_model(name), row.input_CHW, 1)
    return (
        f"`{name}`",
        "x".join(map(str, row.input_CHW)),
        str(row.num_classes),
        f"{volumes.parameters:,}",
        f"{volumes.macs / 1e6:,.1f} M",
        f"{volumes.weight_bytes / 1e6:,.1f} MB",
        f"{1024 * volumes.data_bytes / 1e6:,.0f} MB",
        row.source,
    )


MAKERS: dict[str, Callable[[], Iterable[str]]] = {
    "commands": commands,
    "recipe": recipe,
    "recipes": recipes,
    "exit codes": exit_codes,
    "refusals": refusals,
    "fits": fits,
    "networks": networks,
    "functions": functions,
    "sections": sections,
}
MARK = re.compile(f"<!-- ({'|'.join(MAKERS)}) -->")
