"""The pages that are made from code say what the code has: all of it, and in its order."""

import re
from functools import cache
from pathlib import Path

import pytest

import firecaffe
from docs import made_from_code
from docs.made_from_code import MAKERS, filled, parsers
from firecaffe import api, errors
from firecaffe.cli import COMMANDS, INTERRUPTED
from firecaffe.cli.help import help_text
from firecaffe.faults import KINDS
from firecaffe.models import MODELS
from firecaffe.models.known_networks import OURS
from firecaffe.recipe.identity import flatten
from firecaffe.recipe.sections import Recipe, shipped
from tests.kit.models_pages import ROOT, page, table_of

FOLDER = ROOT / "docs" / "reference"
PAGES = {
    "commands.md": ["commands"],
    "recipe.md": ["recipe"],
    "recipes.md": ["recipes"],
    "errors.md": ["exit codes"],
    "networks.md": ["networks"],
    "refusals.md": ["refusals", "fits"],
    "python.md": ["functions", "sections"],
}


@cache
def made(name: str) -> str:
    return "\n".join(MAKERS[name]())


def test_each_mark_is_on_its_page_and_is_filled() -> None:
    marks = {
        path.name: re.findall(r"<!-- ([a-z ]+) -->", path.read_text("utf-8"))
        for path in FOLDER.glob("*.md")
    }
    assert {name: found for name, found in marks.items() if found} == PAGES
    assert sorted(mark for found in PAGES.values() for mark in found) == sorted(MAKERS)
    text = page("docs/reference/recipe.md")
    assert filled(text) == text.replace("<!-- recipe -->", made("recipe"))


def sections(text: str) -> dict[str, str]:
    """By their headings."""
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_each_command_is_there_with_all_that_help_says_in_its_order() -> None:
    found = sections(made("commands"))
    assert list(found) == [f"`firecaffe {name}`" for name in parsers()]
    assert list(dict.fromkeys(name.split()[0] for name in parsers())) == list(COMMANDS)
    for name, parser in parsers().items():
        text, said = found[f"`firecaffe {name}`"], help_text(name.split(), is_asked=True)
        names = [name for action in parser.own for name in action.option_strings][2:]  # --help
        assert re.findall(r"`(--?[a-z-]+)(?= |`)", "".join(table_lines(text))) == names
        places = [re.search(rf"(^|, )\s*{each}\b", said, re.M) for each in names]
        assert all(places)
        plain = text.replace("`", "").replace("\\", "")
        assert all(" ".join(note.split()).replace("`", "") in plain for note in parser.notes)
        assert len(parser.notes) <= 8


def table_lines(text: str) -> list[str]:
    """The first cells of a command's table."""
    rows = re.findall(r"^\| (`.*?`) \| ", text, re.M)
    return [row for row in rows if row.startswith("`-")]


def test_each_function_that_is_a_command_is_linked_from_it() -> None:
    folder = Path(api.__path__[0])
    twins = {path.stem for path in folder.glob("*.py")} & set(COMMANDS) | {"train", "import_caffe"}
    linked = re.findall(r"^In Python: \{py:func\}`firecaffe\.(\w+)`$", made("commands"), re.M)
    assert set(linked) == twins
    assert all(callable(getattr(firecaffe, name)) for name in linked)


def test_every_setting_of_a_recipe_is_listed_with_its_default_and_meaning() -> None:
    rows = table_of(made("recipe"), "setting")
    defaults = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flatten(Recipe()).items()
    }
    assert {name: row["default"].strip("`") for name, row in rows.items()} == defaults
    assert all(row["meaning"] for row in rows.values())


def test_exit_codes_are_those_of_errors_and_faults() -> None:
    rows = table_of(made("exit codes"), "code")
    own = [
        error
        for error in vars(errors).values()
        if isinstance(error, type)
        and issubclass(error, errors.FirecaffeError)
        and "exit_code" in vars(error)
    ]
    codes = [error.exit_code for error in own]
    assert len(set(codes)) == len(codes)  # others have their parent's
    of_faults = {kind.exit_code for kind in KINDS.values()}
    assert {0, INTERRUPTED, *codes, *of_faults} == {int(code) for code in rows if code.isdigit()}
    named = {
        row["fault of a rank"].strip("`"): int(code)
        for code, row in rows.items()
        if code[-1] != "n"
    }
    assert {name: code for name, code in named.items() if name} == {
        name: kind.exit_code for name, kind in KINDS.items()
    }
    assert all(row["meaning"] for row in rows.values())
    assert "{" not in "".join(row["advice"] for row in rows.values())


def test_each_network_has_its_row_and_the_page_of_its_family() -> None:
    text = made("networks")
    assert list(table_of(text, "network")) == list(MODELS)
    for name, model in MODELS.items():
        assert f".. automodule:: {model.build.__module__}\n" in text, name


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].source != OURS])
def test_the_source_of_a_network_is_told_by_its_family(name: str) -> None:
    model = MODELS[name]
    about = __import__(model.build.__module__, fromlist=["x"]).__doc__ or ""
    words = re.findall(r"[A-Z][\w-]+|\d{4}|cuda-convnet", model.source)
    assert words
    assert all(word in about for word in words)


@pytest.mark.parametrize("name", shipped())
def test_each_recipe_is_there_with_what_its_file_says(name: str) -> None:
    found = sections(made("recipes"))[f"`{name}`"]
    about, _, content = page(f"recipes/{name}.toml").partition("\n\n[")
    assert f"```toml\n[{content}```" in found
    plain = " ".join(found.split("```toml")[0].replace("\\", "").split())
    for line in re.sub(r"^# ?-?", "", about, flags=re.M).splitlines():
        assert " ".join(line.replace("`", "").split()) in plain.replace("`", "")
    assert re.search(r"source", about)


def test_options_and_settings_of_a_text_are_code_and_pages_are_links() -> None:
    text = (
        "as --data.… or --resume, by run.cluster and `x --y *`; *.bias, _a, docs/reference/fcz.md"
    )
    assert made_from_code.prose(text) == (
        "as `--data.…` or `--resume`, by `run.cluster` and `x --y *`; \\*.bias, \\_a, "
        "[docs/reference/fcz.md](../reference/fcz.md)"
    )
