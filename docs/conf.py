"""The pages of the repository and the docstrings of the code as one site: `make docs`.

The source is the whole repository, so that a link from page to page is the same on the site as
it is where the files lie. Sphinx checks each: a warning is an error.
"""

import re
from collections.abc import Iterator
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring

from firecaffe.recipe.fits import FITS
from firecaffe.recipe.refusals import REFUSALS, num_combinations
from firecaffe.recipe.worker_numbers import WORKERS_FIT

project = "firecaffe"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "examples/**.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "runs"]
myst_heading_anchors = 3
"""Headings that can be linked to, by GitHub's rule."""

default_role = "code"
"""What stands between backticks in a docstring."""

autodoc_member_order = "bysource"
maximum_signature_line_length = 88
html_theme_options = {
    "page_width": "1100px",
    "body_max_width": "none",
    "code_font_size": "0.8em",
    "sidebar_includehidden": False,  # the pages of each network, recipe and figure
}
html_copy_source = False
html_show_copyright = False


def to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as reStructuredText: examples are code, `Raises:` is a field as `Args:` is."""
    text = "\n".join(lines)
    text = re.sub(r":\n\n(?= {4})", "::\n\n", text)
    text = re.sub(r"^Raises: ((?:.+\n?)+)", _field, text, flags=re.M)
    # Not as a property or attribute, of which napoleon would take what precedes a colon for a type.
    lines[:] = GoogleDocstring(text, what="object").lines()


def _field(raises: re.Match[str]) -> str:
    return "\n:Raises: " + raises[1].replace("\n", "\n   ").rstrip() + "\n"


def without_objects(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str
) -> tuple[str | None, str]:
    """A signature whose defaults are values, or `...`: `<factory>` is not to be read as one."""
    if signature is not None:
        signature = signature.replace("<factory>", "...")
        signature = re.sub(r"<function (\w+)>", r"\1", signature)
    return signature, returns


def with_refusals(app: Any, name: str, source: list[str]) -> None:
    """The table of what cannot stand together, on its page."""
    source[0] = source[0].replace("<!-- refusals -->", "\n".join(_rows_of_refusals()))
    source[0] = source[0].replace("<!-- fits -->", "\n".join(_rows_of_fits()))


def _rows_of_refusals() -> Iterator[str]:
    unwritten = sum(row.kind == "unwritten" for row in REFUSALS)
    yield f"{len(REFUSALS)} rows, of which {unwritten} are unwritten; "
    yield f"they come to {num_combinations()} combinations of words.\n"
    yield "| these together | because | instead | kind |"
    yield "|---|---|---|---|"
    for row in REFUSALS:
        when = "<br>".join(f"`{term.text}`" for term in row.when)
        yield f"| {when} | {row.because} | {row.instead.replace('*', chr(92) + '*')} | {row.kind} |"


def _rows_of_fits() -> Iterator[str]:
    yield "| words | what fits |"
    yield "|---|---|"
    for fit in (*FITS, *WORKERS_FIT):
        words = ", ".join(f"`{word}`" for word in fit.words)
        yield f"| {words} | {' '.join((fit.problem.__doc__ or '').split())} |"


def setup(app: Any) -> None:
    app.connect("source-read", with_refusals)
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("autodoc-process-signature", without_objects)
