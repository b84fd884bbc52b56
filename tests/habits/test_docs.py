"""Pages say what the program has: their lists are its tables, their figures come from its code.

explanation/exchange.md, whose formulas are evaluated, has `test_formulas`; commands and blocks of
code are run by `tests/cli/test_shown_commands.py` and `test_scripts_page.py`.
"""

import dataclasses
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
from benchmarks.faults.on_purpose import KINDS as INJECTIONS
from benchmarks.faults.on_purpose import Injection
from benchmarks.training.large_batch_page import page as large_batch_page
from benchmarks.training.speedup import RECORD
from benchmarks.training.speedup_words import words as speedup_words
from docs.made_from_code import filled
from firecaffe.caffe.layers import LAYERS
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.leaves import equal_shares
from firecaffe.faults import KINDS
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe
from firecaffe.synchrony.config import MODES
from firecaffe.synchrony.shares import longest_s, next_shares
from tests.kit.models_pages import ROOT, page, table
from tests.kit.models_refused import refused

FAULTS, RESULTS = "docs/explanation/faults.md", "benchmarks/results"
ON_PURPOSE = "docs/howto/faults_on_purpose.md"


FAULT_ROWS = table(FAULTS, "kind")


LISTS: dict[str, tuple[Iterable[str], Iterable[str]]] = {
    "modes": (table("docs/explanation/synchrony.md", "`synchrony.mode`"), MODES),
    "kinds of faults": (FAULT_ROWS, KINDS),
    "faults on purpose": (table(ON_PURPOSE, "kind"), INJECTIONS),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_what_there_is(name: str) -> None:
    listed, there = LISTS[name]
    assert set(listed) == set(there)


def test_words_of_a_fault_on_purpose() -> None:
    words = [word for word in dataclasses.fields(Injection) if word.name != "kind"]
    defaults = {word.name: str(word.default).removesuffix(".0") for word in words}
    rows = table(ON_PURPOSE, "word")
    assert {name: row["default"].strip("`") for name, row in rows.items()} == defaults


def test_exit_codes_are_those_of_faults() -> None:
    codes = {name: int(row["exit code"]) for name, row in FAULT_ROWS.items()}
    assert codes == {name: kind.exit_code for name, kind in KINDS.items()}


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


def shown() -> Iterator[Any]:
    for kind, name in re.findall(r"^\.\. auto(\w+):: ([\w.]+)", REFERENCE, re.M):
        found = resolve_name(name)
        if kind == "module":
            own = {word: each for word, each in vars(found).items() if word[0] != "_"}
            yield from (e for e in own.values() if getattr(e, "__module__", "") == name)
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


def test_each_member_of_a_shown_class_is_described() -> None:
    """Sphinx leaves out a member without a description, and says nothing."""
    missing = {}
    for public in filter(inspect.isclass, shown()):
        documented = {name for name in vars(public) if inspect.getdoc(getattr(public, name, None))}
        missing[public.__name__] = members(public) - documented - described(public)
    assert len(missing) > 30
    assert [name for name, words in missing.items() if words] == []


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


def test_the_page_of_caffe_names_each_layer() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", page("docs/reference/caffe.md")))
    assert set(LAYERS) <= named


PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]


def test_the_pages_are_short() -> None:
    assert sum(path.stat().st_size for path in PAGES) <= 220_000
    assert len(page("README.md").splitlines()) <= 120
    long = [path.name for path in ROOT.glob("docs/howto/*.md") if path.stat().st_size > 4_300]
    assert long == []
