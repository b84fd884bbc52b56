"""Pictures of `--plot`: a PNG, or an HTML page that contains one."""

import io
from base64 import b64encode
from pathlib import Path
from typing import Any

from firecaffe.api.console import check_target
from firecaffe.errors import RecipeError
from firecaffe.files import written_aside

SUFFIXES = (".png", ".html")
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{0}</title>
<style>body {{ margin: 0 auto; max-width: 80rem; font: 16px/1.4 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; margin: .5rem; }} img {{ max-width: 100%; }}</style>
<main><h1>{0}</h1><img alt="{1}" src="data:image/png;base64,{2}"></main></html>"""


def check_picture(word: str, name: str, overwrite: bool, suffixes: tuple[str, ...]) -> None:
    """Check a picture's path like `check_target`. Raises RecipeError if matplotlib is missing."""
    check_target(word, name, overwrite, suffixes)
    if name:
        load_figure(word)


def load_figure(word: str = "--plot") -> Any:
    """Load matplotlib's Figure for option `word`. Raises RecipeError without matplotlib.

    A figure without pyplot needs no screen, and changes no setting of a notebook.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RecipeError(f"{word} needs matplotlib: pip install 'firecaffe[plot]'") from None
    return Figure


def take_literally(figure: Any) -> None:
    """Show titles and names as they are: a `$` in them begins no formula."""
    for axes in figure.axes:
        legend = axes.get_legend()
        names = legend.get_texts() if legend is not None else ()
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *names):
            text.set_parse_math(False)


def write_picture(path: Path, figure: Any, title: str, alternative: str) -> None:
    """Write a figure whole or not at all. `alternative` is its text for those who cannot see."""
    take_literally(figure)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    content = picture.getvalue()
    if path.suffix == ".html":
        content = PAGE.format(title, alternative, b64encode(content).decode()).encode()
    with written_aside(path) as aside:
        aside.write_bytes(content)
