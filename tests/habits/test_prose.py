"""The check of the pages' English finds what it should, and nothing in code or addresses."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.prose import PHRASES, ROOT, main, pages, problems

LONG = "The worker sends " + "a gradient and " * 14 + "it ends."


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (LONG, "words"),
        (f"- {LONG}", "words"),
        ("A rank that is of no use leaves.", "useless"),
        ("# What one's data need", "your"),
        ("| a | b |\n|---|---|\n| of one's own | 1 |", "your own"),
        ("This is very good.", "leave it out"),
        ("The the rank leaves.", "lexical_illusions"),
    ],
)
def test_it_is_found(text: str, part: str) -> None:
    assert part in " ".join(problem for _, problem in problems(text))


@pytest.mark.parametrize(
    "text",
    [
        "The worker sends a gradient. It ends.",
        "Two clauses of some length stand here, one after another: each of them is counted by "
        "itself, since a colon ends the first; the second ends here, and no sooner than that.",
        "`of one's own` and ``very`` are code.",
        "```\nvery very long output of a command\n```",
        "    firecaffe train very very recipe.toml",
        "[a link](https://example.org/of-one's-own/very)",
    ],
)
def test_it_is_fine(text: str) -> None:
    assert list(problems(text)) == []


def test_a_line_names_the_place_and_the_code_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.prose.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Fine.\n\nA very\nlong way.\n")
    assert main([str(page)]) == 1
    assert capsys.readouterr().out.startswith("page.md:3: ")
    page.write_text("Fine.\n")
    assert main([str(page)]) == 0


def test_every_page_for_users_is_read() -> None:
    names = {str(path.relative_to(Path(__file__).parents[2])) for path in pages()}
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "SECURITY.md"} <= names


def messages() -> Iterator[tuple[str, str]]:
    """Each string with a blank in it that is no docstring, with its place."""
    for path in sorted(ROOT.glob("firecaffe/**/*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        nodes = [*ast.walk(tree)]
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in alone and " " in str(node.value):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", str(node.value)


def test_no_message_is_inverted() -> None:
    found = [
        (place, text) for place, text in messages() for like, _ in PHRASES if like.search(text)
    ]
    assert found == []
