"""Where tables are printed: as wide as the terminal, and uncut if there is none."""

from rich.console import Console

UNCUT_WIDTH = 170


def make_console(stderr: bool = False) -> Console:
    console = Console(highlight=False, stderr=stderr)
    if console.is_terminal:
        return console
    return Console(highlight=False, stderr=stderr, width=UNCUT_WIDTH)


def time_words(seconds: float) -> str:
    """Three digits, in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
