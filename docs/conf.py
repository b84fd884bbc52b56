"""The pages of the repository and the docstrings of the code as one site: `make docs`.

The source is the whole repository, so that a link from page to page is the same on the site as
it is where the files lie. Sphinx checks each: a warning is an error.
"""

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.made_from_code import SECTIONS, filled

project = "firecaffe"
release = metadata.version("firecaffe")
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
smartquotes_action = "qe"
"""Dashes stay as they are: `--resume` is an option."""

html_theme = "furo"
html_title = f"firecaffe {release}"
html_copy_source = False
html_show_copyright = False


def to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as reStructuredText: examples are code, `Raises:` is a field as `Args:` is.

    The settings of a recipe's section have a page of their own.
    """
    text = "\n".join(lines)
    if obj in SECTIONS.values():
        text = re.sub(
            r"^Args:.*", "Its settings: :doc:`/docs/reference/recipe`", text, flags=re.M | re.S
        )
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


def from_code(app: Any, name: str, source: list[str]) -> None:
    """What a page of the reference has from code, in place of its marks."""
    if name.startswith("docs/reference/"):
        source[0] = filled(source[0])


def setup(app: Any) -> None:
    app.connect("source-read", from_code)
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("autodoc-process-signature", without_objects)
