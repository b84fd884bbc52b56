"""The repository's own rules: short files, plain names, and what is asked in one place."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 400
FORBIDDEN_NAMES = ("utils", "util", "helpers", "common", "misc")


def tracked() -> list[Path]:
    """The project's files: git's, or all that is no build product where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines() if (ROOT / line).is_file()]


FILES = {path: (ROOT / path).read_text() for path in tracked() if path.suffix == ".py"}


def test_python_files_are_short_and_begin_by_saying_what_they_are_for() -> None:
    assert [str(path) for path, text in FILES.items() if text.count("\n") > MOST_LINES] == []
    assert [str(path) for path in FILES if path.stem in FORBIDDEN_NAMES] == []
    assert [str(p) for p, text in FILES.items() if text and not text.startswith('"""')] == []


PRODUCT = ROOT / "firecaffe"

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
    *("training/choices.py", "planner/of_parallel.py", "planner/server_costs.py"),
)
"""Where words are checked, and objects chosen."""

LINES = 60
"""Of a function, at most."""
ROOMS = ("training", "parallel", "synchrony", "planner")


def trees(*rooms: str) -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(PRODUCT.rglob("*.py")):
        path = file.relative_to(PRODUCT).as_posix()
        if not rooms or path.partition("/")[0] in rooms:
            yield path, ast.parse(file.read_text(encoding="utf-8"))


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
        with_none = any(isinstance(each, ast.Constant) and each.value is None for each in sides)
        of_words = any(isinstance(each, ast.Attribute) and each.attr in WORDS for each in sides)
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
    for each in of:
        if isinstance(each, ast.Attribute) and each.attr == "stages":
            yield each


def questions(tree: ast.Module) -> set[int]:
    """The lines that ask."""
    found = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and asks(node)}
    return found | {each.lineno for node in ast.walk(tree) for each in asks_for_stages(node)}


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
    found = {path: len(questions(tree)) for path, tree in trees() if not path.startswith(CHOOSES)}
    most = sorted(found.items(), key=lambda each: -each[1])[:5]
    assert sum(found.values()) <= QUESTIONS, most


def test_functions_are_read_in_one_sitting() -> None:
    found = {
        f"{path}:{node.name}"
        for path, tree in trees(*ROOMS)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LINES
    }
    assert found == set()
