"""Checks the English of the pages: `python -m tools.prose [PAGE…]`, a part of `make lint`.

A sentence has at most so many words, none of the phrases of tools/prose.toml stands in a page, and
proselint has nothing against it. Code, quotations of output and links' addresses are not English.
No page is excepted.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from proselint.checks import __register__ as checks_of_proselint
from proselint.config import DEFAULT
from proselint.tools import CheckRegistry, LintFile

ROOT = Path(__file__).parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    *("docs/**/*.md", "examples/**/*.md", ".github/**/*.md"),
)
"""LOG.md and benchmarks/results are records: of decisions, as of their day, and of measurements."""

RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
MAX_WORDS = RULES["most_words"]
PHRASES = [(re.compile(rf"\b(?:{like})\b", re.I), say) for like, say in RULES["phrases"].items()]
OFF = dict.fromkeys(RULES["not_of_proselint"], False)
# The first that fits a check's name counts.
PROSELINT = DEFAULT | {
    "checks": OFF | {name: on for name, on in DEFAULT["checks"].items() if name not in OFF}
}

CheckRegistry().register_many(checks_of_proselint)

ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|Fig|Eq|No|pp?)\.")


@dataclass(frozen=True)
class Prose:
    """A piece of running text. is_whole: it is made of sentences, as a table's cell need not be."""

    line: int
    text: str
    is_whole: bool


def pages() -> list[Path]:
    return sorted({path for like in PAGES for path in ROOT.glob(like)})


def prose(markdown: str) -> Iterator[Prose]:
    """Yield the paragraphs, items, headings and cells of a page, without their code."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    for before, token in pairwise(tokens):
        if token.type == "inline" and (text := _spoken(token)).strip():
            line = (token.map or before.map or [0])[0] + 1
            yield Prose(line, text, before.type == "paragraph_open")


def _spoken(inline: Token) -> str:
    """The text, with each piece of code as one word."""
    said: dict[str, Callable[[str], str]] = {
        "text": lambda text: text,
        "softbreak": lambda _: " ",
        "hardbreak": lambda _: ". ",
        "code_inline": lambda code: re.sub(r"\W+", "_", f"`{code}`"),
    }
    children = inline.children or ()
    return "".join(said[child.type](child.content) for child in children if child.type in said)


def sentences(text: str) -> list[str]:
    """Cut at full stops, question marks, colons and semicolons that blanks follow."""
    text = ABBREVIATIONS.sub(r"\1", text)
    return [part for part in re.split(r"(?<=[.!?:;])[)\"”]*\s+", text) if part.strip()]


def problems(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield what is not plain English, with its line."""
    for piece in prose(markdown):
        for like, say in PHRASES:
            for match in like.finditer(piece.text):
                yield piece.line, f"{match[0]!r}: {say}"
        for sentence in sentences(piece.text) if piece.is_whole else ():
            words = len(re.findall(r"[\w'-]+", sentence))
            if words > MAX_WORDS:
                yield piece.line, f"a sentence of {words} words: {sentence[:60]}…"
        for result in LintFile(content=piece.text, source="-").lint(PROSELINT):
            yield piece.line, f"{result.check_result.message} ({result.check_result.check_path})"


def main(names: list[str]) -> int:
    count = 0
    for path in map(Path, names) if names else pages():
        for line, problem in problems(path.read_text("utf-8")):
            print(f"{path.resolve().relative_to(ROOT)}:{line}: {problem}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
