"""Pages say what the program has: their lists are its tables, their figures come from its code.

docs/exchange.md, whose formulas are evaluated, has `test_formulas`; commands and blocks of code are
run by `tests/cli/test_shown_commands.py` and `test_scripts_page.py`.
"""

import inspect
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import Any

import pytest
from docstring_parser import parse
from sphinx.pycode import ModuleAnalyzer

import firecaffe
from benchmarks.faults_on_purpose import KINDS as INJECTIONS
from benchmarks.large_batch_page import page as large_batch_page
from benchmarks.speedup import RECORD
from benchmarks.speedup_words import words as speedup_words
from firecaffe import errors
from firecaffe.cli import COMMANDS, INTERRUPTED
from firecaffe.cli.typed_recipe import read_recipe
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.leaves import equal_shares
from firecaffe.faults import KINDS
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.of_recipe import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.identity import flatten
from firecaffe.recipe.sections import Recipe
from firecaffe.synchrony.config import MODES
from firecaffe.synchrony.shares import longest_s, next_shares
from tests.kit.models_pages import ROOT, page, table
from tests.kit.models_refused import refused

USAGE, FAULTS, RESULTS = "docs/usage.md", "docs/faults.md", "benchmarks/results"
RECIPES = {path.stem for path in ROOT.glob("recipes/*.toml")}
ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.FirecaffeError)
]


FAULT_ROWS = table(FAULTS, "kind", until="## Faults on purpose")


def linked(labels: Iterable[str]) -> set[str]:
    return {re.sub(r"^\[(\w+)\]\(\1\.md\)$", r"\1", label) for label in labels}


LISTS: dict[str, tuple[Iterable[str], Iterable[str]]] = {
    "commands": (re.findall(r"^### `firecaffe (\w+)", page(USAGE), re.M), COMMANDS),
    "modes": (table("docs/synchrony.md", "`synchrony.mode`"), MODES),
    "kinds of faults": (FAULT_ROWS, KINDS),
    "faults on purpose": (table(FAULTS, "kind", "## Faults on purpose"), INJECTIONS),
    "recipes": (linked(table("docs/recipes/README.md", "recipe")), RECIPES),
    "pages of recipes": (
        {path.stem for path in ROOT.glob("docs/recipes/*.md")},
        {*RECIPES, "README"},
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_what_there_is(name: str) -> None:
    listed, there = LISTS[name]
    assert set(listed) == set(there)


def test_exit_codes_are_those_of_errors_and_faults() -> None:
    listed = {int(code) for code in table(USAGE, "code") if code.isdigit()}
    assert {0, INTERRUPTED, *(each.exit_code for each in ERRORS)} <= listed
    own = [each.exit_code for each in ERRORS if "exit_code" in vars(each)]
    assert len(set(own)) == len(own)  # others have their parent's
    codes = {name: int(row["exit code"]) for name, row in FAULT_ROWS.items()}
    assert codes == {name: kind.exit_code for name, kind in KINDS.items()}


def test_every_word_of_a_recipe_is_listed_with_its_default() -> None:
    rows = table(USAGE, "word", "## The words of a recipe")
    defaults = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flatten(Recipe()).items()
    }
    assert {name: row["default"].strip("`") for name, row in rows.items()} == defaults


def test_exchanges_that_refuse_codecs_are_named() -> None:
    text = page("docs/exchange.md").split("not made for tree order (")[1].split(")")[0]
    for name in EXCHANGES:
        recipe = Recipe(exchange=ExchangeConfig(algorithm=name, compressor="int8"))
        named = refused(RecipeError, ["use tree"]) if f"`{name}`" in text else nullcontext()
        with named:
            check_recipe(recipe)


def test_what_measured_shares_win() -> None:
    rows = table("docs/synchrony.md", "micro-batches of a step")
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


WITH_FORECASTS = [
    name for name in sorted(RECIPES) if "| cluster |" in page(f"docs/recipes/{name}.md")
]


@pytest.mark.parametrize("name", WITH_FORECASTS)
def test_forecasts_are_the_planners(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "tests")  # where there are no data
    work = workload_of(check_recipe(read_recipe(ROOT / f"recipes/{name}.toml")))
    text = page(f"docs/recipes/{name}.md")
    rows = re.findall(r"^\| ([\w-]+) \| (\d+) \| (\w+|-) \| .*h \|$", text, re.M)
    assert len(rows) == 6
    for cluster, workers, exchange in rows:
        algorithm = "tree" if exchange == "-" else exchange
        row = forecast(work, load_cluster(cluster), int(workers), algorithm)
        assert (
            f"| {cluster} | {workers} | {exchange} | {1e3 * row.step_s:,.0f} ms "
            f"| {row.images_per_s:,.0f} | {row.speedup:.1f} | {row.efficiency:.0%} "
            f"| {row.hours:,.1f} h |"
        ) in text


def test_measured_pages_are_their_records() -> None:
    record = json.loads(page(f"{RESULTS}/large_batch.json"))
    assert page(f"{RESULTS}/large_batch.md") == large_batch_page(record)
    words = speedup_words(json.loads(RECORD.read_text("utf-8"))).split()
    assert " ".join(words) in " ".join(page("docs/figures.md").split())


REFERENCE = "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/reference/*.md")))


def shown() -> Iterator[Any]:
    for kind, name in re.findall(r"^\.\. auto(\w+):: ([\w.]+)", REFERENCE, re.M):
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


def names() -> Iterator[str]:
    """The public names; those of a module that is one with it before them."""
    for name in firecaffe.__all__:
        public = getattr(firecaffe, name)
        inner = getattr(public, "__all__", ()) if inspect.ismodule(public) else ()
        yield from (f"{name}.{member}" for member in inner)
        if not inner:
            yield name


@pytest.mark.parametrize("name", [*names()])
def test_a_public_name_is_shown(name: str) -> None:
    public = resolve_name(f"firecaffe.{name}")
    assert any(each is public for each in shown())


@pytest.mark.parametrize("name", [name for name in names() if not name.endswith("Error")])
def test_each_word_of_a_public_name_is_described(name: str) -> None:
    public = resolve_name(f"firecaffe.{name}")
    words = inspect.signature(public).parameters.values()
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert {word.name for word in words if word.kind not in collected} <= described(public)


ARCHITECTURE = page("docs/architecture.md")


def test_the_layers_of_the_page_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads(page("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    shown = re.findall(
        r"^    (\w+(?: \| \w+)*)  +\S", ARCHITECTURE.partition("\n\n`exchange`")[0], re.M
    )
    assert shown == contracts[0]["layers"]


PACKAGES = {path.parent.name for path in ROOT.glob("firecaffe/*/__init__.py")}
MODULES = {
    name
    for name in re.findall(r"(?<![\w./])([a-z_]+(?:\.\w+)+)", ARCHITECTURE)
    if name.partition(".")[0] in PACKAGES and not name.endswith((".py", ".md", ".toml", ".json"))
}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_that_the_page_names_is_there(name: str) -> None:
    resolve_name(f"firecaffe.{name}")
