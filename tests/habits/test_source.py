"""The repository's own rules: short files, plain names, and what is asked in one place."""

import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
FORBIDDEN_NAMES = ("utils", "util", "helpers", "common", "misc")

PRODUCT = ROOT / "firecaffe"
TREES = {
    path.relative_to(PRODUCT).as_posix(): ast.parse(path.read_text("utf-8"))
    for path in sorted(PRODUCT.rglob("*.py"))
}


def tracked() -> list[Path]:
    """The project's files: git's, or all that is no build product where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def test_python_files_are_short_and_begin_by_saying_what_they_are_for() -> None:
    files = {path: (ROOT / path).read_text() for path in tracked() if path.suffix == ".py"}
    assert [str(path) for path, text in files.items() if text.count("\n") > MAX_LINES] == []
    assert [str(path) for path in files if path.stem in FORBIDDEN_NAMES] == []
    assert [str(p) for p, text in files.items() if text and not text.startswith('"""')] == []


TWICE = {"__init__", "config", "import_and_pack", "schedule", "train"}
"""Names that more than one file may have: sections of recipes, a command and its function."""


def test_a_file_has_a_name_of_its_own() -> None:
    counts = Counter(Path(name).stem for name in TREES)
    assert {name for name, count in counts.items() if count > 1} == TWICE


def test_a_class_has_a_name_of_its_own() -> None:
    places = defaultdict[str, list[str]](list)
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(path)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def nodes(*rooms: str) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in TREES.items():
        if not rooms or path.partition("/")[0] in rooms:
            yield from ((path, node) for node in ast.walk(tree))


STARTS = ("Of ", "What ", "Those ", "Where ", "By ", "The same ")


def test_a_docstring_stands_alone() -> None:
    """It begins with a verb or a noun, and so is read in a tooltip without the lines around."""
    dependent = [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith(STARTS)
    ]
    assert dependent == []


SAYS_NOTHING = ("each", "found", "told")


def test_a_variable_says_what_it_holds() -> None:
    """One that is assigned, or is a parameter of a private function."""
    nothing = []
    for path, node in nodes():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
            of = node.args
            names = [arg.arg for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
        else:
            continue
        nothing += [f"{path}:{node.lineno}" for name in names if name in SAYS_NOTHING]
    assert nothing == []


QUESTIONS = 28
"""Lines that ask, but for those of `CHOOSES`."""

PROPERTIES = (
    *("is_served", "has_real_server", "is_simulated", "goes_on_without_workers", "is_lockless"),
    *("is_local", "is_split", "is_whole", "in_shards", "shares_samples"),
)
WORDS = ("mode", "scheme")
OPTIONAL = ("served", "stage", "staged", "shards")
"""Names of what only some runs have. `local` are ranks of one host everywhere, `rows` those of a
tensor.
"""

INNOCENT = ("image", "rounds")
"""What has a mode of another kind, or is whole in another sense."""

CHOOSES = (
    *("recipe/", "parallel/config.py", "synchrony/config.py", "training/checks.py"),
    *("training/choices.py", "planner/recipe_layout.py", "planner/server_costs.py"),
)
"""Where words are checked, and objects chosen."""


def name_of(node: ast.expr) -> str:
    """The last name of `a.b.c`, of which it is c."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        if name_of(getattr(node.left, "value", node.left)) in INNOCENT:
            return False
        sides = [node.left, *node.comparators]
        with_none = any(isinstance(side, ast.Constant) and side.value is None for side in sides)
        of_words = any(isinstance(side, ast.Attribute) and side.attr in WORDS for side in sides)
        return of_words or (with_none and name_of(node.left) in OPTIONAL)
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return False
    return node.attr in PROPERTIES and name_of(node.value) not in INNOCENT


def asks_for_stages(node: ast.AST) -> Iterator[ast.expr]:
    """Where it is asked whether there are stages; who takes their names asks nothing."""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        of = [node.test]
    elif isinstance(node, ast.BoolOp):
        of = node.values
    elif isinstance(node, ast.UnaryOp):
        of = [node.operand]
    else:
        of = node.ifs if isinstance(node, ast.comprehension) else []
    return (side for side in of if isinstance(side, ast.Attribute) and side.attr == "stages")


def questions(tree: ast.Module) -> set[int]:
    """The lines that ask."""
    walked = [*ast.walk(tree)]
    lines = {node.lineno for node in walked if isinstance(node, ast.expr) and asks(node)}
    return lines | {side.lineno for node in walked for side in asks_for_stages(node)}


def test_what_counts_as_a_question() -> None:
    text = """
if run.mode == LOCAL:
    pass
if served is not None and words.is_split:
    pass
name = found.mode
if rank is None:
    pass
for each in recipe.parallel.stages:
    pass
if not recipe.parallel.stages:
    pass
if run.rounds.is_whole(step):
    pass
"""
    assert questions(ast.parse(text)) == {2, 4, 11}


def test_nobody_asks_more() -> None:
    counts = {p: len(questions(tree)) for p, tree in TREES.items() if not p.startswith(CHOOSES)}
    assert sum(counts.values()) <= QUESTIONS, Counter(counts).most_common(5)


LINES = 60
"""Of a function, at most."""


def test_functions_are_read_in_one_sitting() -> None:
    long = {
        f"{path}:{node.name}"
        for path, node in nodes("training", "parallel", "synchrony", "planner")
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LINES
    }
    assert long == set()
