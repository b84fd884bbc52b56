"""Errors about split layers and stages, by the recipe's word that asked for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ParallelConfig

OF_LAYERS, OF_STAGES = "split", "stages"
"""What such errors begin with, which `firecaffe.split` and `cut_stages` raise too."""


@contextmanager
def in_words_of(words: ParallelConfig) -> Iterator[None]:
    """Names in the block's errors the word that the recipe has. Raises: RecipeError."""
    try:
        yield
    except RecipeError as error:
        of, _, said = str(error).partition(": ")
        word = {OF_LAYERS: words.word, OF_STAGES: "parallel.stages"}.get(of)
        if word is None:
            raise
        raise RecipeError(f"{word}: {said}") from error
