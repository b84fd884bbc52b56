"""Draws what a command printed as an SVG picture, for the README.

make demo | python benchmarks/picture.py "make demo" > docs/demo.svg
"""

import io
import re
import sys

from rich.console import Console
from rich.text import Text


def main() -> None:
    title, lines = sys.argv[1], sys.stdin.read().rstrip().splitlines()
    width = max(map(len, lines))
    console = Console(record=True, width=width, file=io.StringIO())
    for line in lines:
        # An indentation of its own style, or some viewers drop it.
        text = line.lstrip()
        console.print(Text.assemble(line.removesuffix(text), (text, "white")), soft_wrap=True)
    # Without the fonts that rich would have a reader's browser fetch.
    print(re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL))


if __name__ == "__main__":
    main()
