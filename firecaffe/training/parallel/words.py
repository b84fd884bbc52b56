"""Errors about split layers and stages, by the recipe's word that asked for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ParallelConfig

OF_LAYERS, OF_STAGES = "split: ", "stages: "
"""What such errors begin with, which `firecaffe.split` and `cut_stages` raise too."""


@contextmanager
def in_words_of(words: ParallelConfig) -> Iterator[None]:
    """Names in the block's errors the word that the recipe has. Raises: RecipeError."""
    try:
        yield
    except RecipeError as error:
        said = str(error)
        if not said.startswith((OF_LAYERS, OF_STAGES)):
            raise
        raise RecipeError(f"{words.word}: {said.partition(': ')[2]}") from error
