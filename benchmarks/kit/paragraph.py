"""Prose of a page that a program writes, in lines of at most 100 characters."""

import textwrap


def paragraph(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False
    )
