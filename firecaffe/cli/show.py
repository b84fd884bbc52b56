"""The output of a command whose work a function of `firecaffe.api` does."""

import json
import sys

from firecaffe.api.answer import Answer
from firecaffe.api.console import make_console


def show(answer: Answer, as_json: bool = False) -> None:
    """Print an answer as text or as JSON, and its warnings to stderr."""
    for note in answer.notes:
        print(f"warning: {note}", file=sys.stderr)
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2, allow_nan=False))
    else:
        console = make_console()
        is_terminal = console.is_terminal
        console.width = max(console.width, answer.least_width) if is_terminal else answer.width
        answer.print_to(console)
