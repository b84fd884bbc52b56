"""Pages say what the program has: their lists are its tables, their figures come from its code.

explanation/exchange.md, whose formulas are evaluated, has `test_formulas`; commands and blocks of
code are run by `tests/cli/test_shown_commands.py` and `test_scripts_page.py`. "Made" is what is
made from code, in its order.
"""

import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from pkgutil import resolve_name
from typing import Any

import pytest
from docstring_parser import parse
from sphinx.pycode import ModuleAnalyzer

import firecaffe
from benchmarks.faults.on_purpose import KINDS as INJECTIONS
from benchmarks.faults.on_purpose import Injection
from benchmarks.training.large_batch_page import page as large_batch_page
from benchmarks.training.speedup import RECORD
from benchmarks.training.speedup_words import words as speedup_words
from docs.made_from_code import MAKERS, filled, parsers, prose
from firecaffe import errors
from firecaffe.caffe.layers import LAYERS
from firecaffe.cli import COMMANDS, INTERRUPTED
from firecaffe.cli.help import help_text
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.leaves import equal_shares
from firecaffe.faults import KINDS
from firecaffe.gradients.compressors import COMPRESSORS, FIXED_LENGTH
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models import MODELS
from firecaffe.models.known_networks import OURS
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.refusals import refusals
from firecaffe.recipe.sections import Recipe, flatten, shipped
from firecaffe.recipe.terms import VARIABLE_LENGTH, facts_of
from firecaffe.solvers.optimizer import SOLVERS
from firecaffe.solvers.rate_policy import POLICIES
from firecaffe.synchrony.config import MODES
from firecaffe.synchrony.shares import longest_s, next_shares
from tests.kit.models_pages import ROOT, page, table, table_of
from tests.kit.models_refused import refused

RESULTS = "benchmarks/results"
ON_PURPOSE = "docs/howto/faults_on_purpose.md"


def test_lists_are_what_there_is() -> None:
    assert set(table("docs/explanation/synchrony.md", "`synchrony.mode`")) == set(MODES)
    rows = table("docs/explanation/faults.md", "kind")
    codes = {name: int(row["exit code"]) for name, row in rows.items()}
    assert codes == {name: kind.exit_code for name, kind in KINDS.items()}
    assert set(table(ON_PURPOSE, "kind")) == set(INJECTIONS)
    words = [word for word in dataclasses.fields(Injection) if word.name != "kind"]
    defaults = {word.name: str(word.default).removesuffix(".0") for word in words}
    rows = table(ON_PURPOSE, "word")
    assert {name: row["default"].strip("`") for name, row in rows.items()} == defaults
    named = set(re.findall(r"`([A-Z]\w+)`", page("docs/reference/caffe.md")))
    assert set(LAYERS) <= named


def test_exchanges_that_refuse_codecs_are_named() -> None:
    text = page("docs/explanation/exchange.md").split("not made for tree order (")[1].split(")")[0]
    for name in EXCHANGES:
        recipe = Recipe(exchange=ExchangeConfig(algorithm=name, compressor="int8"))
        named = refused(RecipeError, ["use tree"]) if f"`{name}`" in text else nullcontext()
        with named:
            check_recipe(recipe)


def test_what_measured_shares_win() -> None:
    rows = table("docs/howto/mixed_gpus.md", "micro-batches of a step")
    seconds = [1.0, 1.0, 1.0, 2.0]
    for leaves, row in rows.items():
        equal = equal_shares(int(leaves), 4)
        both = equal, next_shares(int(leaves), seconds, equal)
        times = [longest_s(shares, seconds) for shares in both]
        counts = [", ".join(str(len(share)) for share in shares) for shares in both]
        *cells, factor = list(row.values())[1:]
        assert cells == [f"{of}: {time:g}" for of, time in zip(counts, times, strict=True)]
        assert float(factor) == pytest.approx(times[0] / times[1], abs=0.005)
    assert len(rows) == 6


def test_measured_pages_are_their_records() -> None:
    record = json.loads(page(f"{RESULTS}/large_batch.json"))
    assert page(f"{RESULTS}/large_batch.md") == large_batch_page(record)
    words = speedup_words(json.loads(RECORD.read_text("utf-8"))).split()
    assert " ".join(words) in " ".join(page("docs/reference/figures.md").split())


REFERENCE = "\n".join(filled(path.read_text()) for path in sorted(ROOT.glob("docs/reference/*.md")))


@cache
def shown() -> list[Any]:
    """What the reference shows: names, or all names of a module of its own."""
    public = []
    for kind, name in re.findall(r"^\.\. auto(\w+):: ([\w.]+)", REFERENCE, re.M):
        value = resolve_name(name)
        if kind == "module":
            members = [member for word, member in vars(value).items() if word[0] != "_"]
            public += [each for each in members if getattr(each, "__module__", "") == name]
        else:
            public.append(value)
    return public


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


def test_each_member_of_a_shown_class_is_described() -> None:
    """Sphinx leaves out a member without a description, and says nothing."""
    missing = {}
    for public in filter(inspect.isclass, shown()):
        documented = {name for name in vars(public) if inspect.getdoc(getattr(public, name, None))}
        missing[public.__name__] = members(public) - documented - described(public)
    assert len(missing) > 30
    assert [name for name, words in missing.items() if words] == []


def names() -> Iterator[tuple[str, Any]]:
    """The public names; those of a module that is one with it before them."""
    for name in firecaffe.__all__:
        public = getattr(firecaffe, name)
        inner = getattr(public, "__all__", ()) if inspect.ismodule(public) else ()
        yield from ((f"{name}.{member}", getattr(public, member)) for member in inner)
        if not inner:
            yield name, public


def test_a_public_name_is_shown_and_each_of_its_words_is_described() -> None:
    missing, collected = {}, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, public in names():
        assert any(public is other for other in shown()), name
        if not name.endswith("Error"):
            words = inspect.signature(public).parameters.values()
            plain = {word.name for word in words if word.kind not in collected}
            missing[name] = plain - described(public)
    assert {name: words for name, words in missing.items() if words} == {}


ARCHITECTURE = page("docs/explanation/architecture.md")


def test_the_layers_of_the_page_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads(page("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    shown = re.findall(
        r"^    (\w+(?: \| \w+)*)  +\S", ARCHITECTURE.partition("\n\n`exchange`")[0], re.M
    )
    assert shown == contracts[0]["layers"]


def test_a_file_that_the_page_names_is_there() -> None:
    """A name without a folder follows one of the same folder, in the same cell of a table."""
    named = set()
    for cell in re.split(r"[|\n]", ARCHITECTURE):
        folder = ""
        for name in re.findall(r"`((?:[a-z_]+/)*(?:\w+\.py)?)`", cell):
            folder = name.rpartition("/")[0] or folder
            named.add(name if "/" in name else f"{folder}/{name}".lstrip("/"))
    named -= {"", "cli/COMMAND.py"}
    assert len(named) > 80
    roots = ROOT / "firecaffe", ROOT
    assert [each for each in named if not any((root / each).exists() for root in roots)] == []


def test_a_table_that_the_page_names_is_in_its_file() -> None:
    found = re.findall(r"`([A-Z]+)` in `([a-z_/]+)\.py`", ARCHITECTURE)
    assert len(found) > 8
    for name, file in found:
        module = file.removesuffix("/__init__").replace("/", ".")
        assert isinstance(resolve_name(f"firecaffe.{module}:{name}"), dict)


PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]


def test_the_pages_are_short() -> None:
    assert sum(path.stat().st_size for path in PAGES) <= 220_000
    assert len(page("README.md").splitlines()) <= 120
    long = [path.name for path in ROOT.glob("docs/howto/*.md") if path.stat().st_size > 4_300]
    assert long == []


MARKS = {
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
        for path in ROOT.glob("docs/reference/*.md")
    }
    assert {name: on_page for name, on_page in marks.items() if on_page} == MARKS
    assert sorted(mark for on_page in MARKS.values() for mark in on_page) == sorted(MAKERS)
    text = page("docs/reference/recipe.md")
    assert filled(text) == text.replace("<!-- recipe -->", made("recipe"))


def sections(text: str) -> dict[str, str]:
    """By their headings."""
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_each_command_is_there_with_all_that_help_says_in_its_order() -> None:
    commands = sections(made("commands"))
    assert list(commands) == [f"`firecaffe {name}`" for name in parsers()]
    assert list(dict.fromkeys(name.split()[0] for name in parsers())) == list(COMMANDS)
    for name, parser in parsers().items():
        text, said = commands[f"`firecaffe {name}`"], help_text(name.split(), is_asked=True)
        names = [name for action in parser.own for name in action.option_strings][2:]  # --help
        assert re.findall(r"`(--?[a-z-]+)(?= |`)", "".join(table_lines(text))) == names
        places = [re.search(rf"(^|, )\s*{name}\b", said, re.M) for name in names]
        assert all(places)
        plain = text.replace("`", "").replace("\\", "")
        assert all(" ".join(note.split()).replace("`", "") in plain for note in parser.notes)
        assert len(parser.notes) <= 8


def table_lines(text: str) -> list[str]:
    """The first cells of a command's table."""
    rows = re.findall(r"^\| (`.*?`) \| ", text, re.M)
    return [row for row in rows if row.startswith("`-")]


def test_each_function_that_is_a_command_is_linked_from_it() -> None:
    twins = set(COMMANDS) & set(firecaffe.__all__) | {"import_caffe"}
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


ROWS: dict[str, Iterable[str]] = {
    "solver.type": SOLVERS,
    "solver.lr_policy": POLICIES,
    "exchange.algorithm": EXCHANGES,
    "exchange.compressor": COMPRESSORS,
    "synchrony.mode": MODES,
}


@pytest.mark.parametrize("word", ROWS)
def test_a_setting_that_names_a_row_says_which_there_are(word: str) -> None:
    meaning = re.findall(r"\w+", table_of(made("recipe"), "setting")[word]["meaning"])
    assert set(ROWS[word]) <= set(meaning)


def test_codecs_that_a_server_takes_are_named() -> None:
    words = {"exchange.compressor": "threshold", "synchrony.mode": "asynchronous"}
    facts = facts_of(Recipe(), words)
    (row,) = refusals(facts)
    assert set(re.findall(r"\w+", row.instead)) & set(COMPRESSORS) == set(FIXED_LENGTH)
    others = set(re.findall(r"\w+", VARIABLE_LENGTH.text)) & set(COMPRESSORS)
    assert others == set(COMPRESSORS) - set(FIXED_LENGTH)


def test_exit_codes_are_those_of_errors_and_faults() -> None:
    rows = table_of(made("exit codes"), "code")
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    ours = [value for value in classes if issubclass(value, errors.FirecaffeError)]
    codes = [error.exit_code for error in ours if "exit_code" in vars(error)]
    assert len(set(codes)) == len(codes)  # others have their parent's
    faults = {name: kind.exit_code for name, kind in KINDS.items()}
    listed = {int(code) for code in rows if code.isdigit()}
    assert {0, INTERRUPTED, *codes, *faults.values()} == listed
    cells = [(re.findall(r"\w+", row["fault of a rank"]), code) for code, row in rows.items()]
    assert {name: int(code) for names, code in cells for name in names} == faults
    assert all(row["meaning"] for row in rows.values())
    assert "{" not in "".join(row["advice"] for row in rows.values())


def test_each_network_has_its_row_and_the_page_of_its_family_which_tells_the_source() -> None:
    text = made("networks")
    assert list(table_of(text, "network")) == list(MODELS)
    for name, model in MODELS.items():
        module = model.build.__module__
        assert f".. automodule:: {module}\n" in text, name
        if model.source != OURS:
            words = re.findall(r"[A-Z][\w-]+|\d{4}|cuda-convnet", model.source)
            assert words
            assert all(word in (resolve_name(module).__doc__ or "") for word in words), name


@pytest.mark.parametrize("name", shipped())
def test_each_recipe_is_there_with_what_its_file_says(name: str) -> None:
    section = sections(made("recipes"))[f"`{name}`"]
    about, _, content = page(f"recipes/{name}.toml").partition("\n\n[")
    assert f"```toml\n[{content}```" in section
    plain = " ".join(section.split("```toml")[0].replace("\\", "").split())
    for line in re.sub(r"^# ?-?", "", about, flags=re.M).splitlines():
        assert " ".join(line.replace("`", "").split()) in plain.replace("`", "")
    assert re.search(r"source", about)


def test_options_and_settings_of_a_text_are_code_and_pages_are_links() -> None:
    text = "as --data.… or --resume, by run.cluster and `x --y *`; *.bias, _a, docs/reference/a.md"
    assert prose(text) == (
        "as `--data.…` or `--resume`, by `run.cluster` and `x --y *`; \\*.bias, \\_a, "
        "[docs/reference/a.md](../reference/a.md)"
    )
