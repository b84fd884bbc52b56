"""Names of product files, classes and variables: one of each name, and none that says nothing."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

PRODUCT = Path(__file__).parents[2] / "firecaffe"
FILES = sorted(path for path in PRODUCT.rglob("*.py") if path.name != "__init__.py")

TWICE = {"config", "schedule"}
"""Names that more than one file may have: sections of recipes, and a command with what it shows."""

SAYS_NOTHING = ("each", "found", "told")


def test_a_file_has_a_name_of_its_own() -> None:
    """A command and its function in Python have one name, which is the point of it."""
    commands = {path.stem for path in FILES if path.parent.name == "cli"}
    counts = Counter(
        path.stem for path in FILES if not (path.parent.name == "api" and path.stem in commands)
    )
    assert {name for name, count in counts.items() if count > 1} <= TWICE


def test_a_class_has_a_name_of_its_own() -> None:
    places = defaultdict[str, list[str]](list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PRODUCT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


STARTS = ("Of", "What", "Those", "Where", "By", "The same")


def test_a_docstring_stands_alone() -> None:
    """It begins with a verb or a noun, and so is read in a tooltip without the lines around."""
    dependent = [
        f"{path.relative_to(PRODUCT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.startswith(tuple(f"{start} " for start in STARTS))
    ]
    assert dependent == []


def variables(tree: ast.AST) -> list[str]:
    """The names that are assigned, and those of parameters of private functions."""
    stored = [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    private = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_")
    ]
    parameters = [
        arg.arg
        for node in private
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    ]
    return stored + parameters


def test_a_variable_says_what_it_holds() -> None:
    nothing = defaultdict[str, list[str]](list)
    for path in FILES:
        for name in variables(ast.parse(path.read_text())):
            if name in SAYS_NOTHING:
                nothing[str(path.relative_to(PRODUCT))].append(name)
    assert dict(nothing) == {}
