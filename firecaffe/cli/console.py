"""Where tables are printed: as wide as the terminal, and uncut if there is none."""

from rich.console import Console

UNCUT_WIDTH = 170


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=UNCUT_WIDTH)


def time_words(seconds: float) -> str:
    """Three digits, in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
