"""The pages of the repository and the docstrings of the code as one site: `make docs`.

The source is the whole repository, so that a link from page to page is the same on the site as
it is where the files lie. Sphinx checks each: a warning is an error.
"""

import re
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring

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


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", to_rst)
    app.connect("autodoc-process-signature", without_objects)
