"""A figure of matplotlib as SVG in the colors of the reader's light or dark theme."""

import io

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

mpl.use("svg")
# Text stays text; the ids of parts depend on nothing that is random.
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "firecaffe"}

THEME = """<style>
svg { --paper: #ffffff; --ink: #1b1b1b; --faint: #808080; fill: var(--ink); }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --faint: #9aa4ae; }
}
</style>"""
COLORS = {"#ffffff": "var(--paper)", "#000000": "var(--ink)", "#808080": "var(--faint)"}


def svg(figure: Figure, text: str) -> str:
    """Return the figure, which is closed. text: its title, for those who cannot see it.

    The same figure gives the same bytes.
    """
    written = io.StringIO()
    hidden = dict.fromkeys(("Date", "Creator"))
    figure.savefig(written, format="svg", metadata=hidden, transparent=True)
    plt.close(figure)
    drawn = written.getvalue()
    for color, name in COLORS.items():
        drawn = drawn.replace(color, name)
    return drawn.replace(" <defs>", f"<title>{text}</title>\n{THEME}\n <defs>", 1)
