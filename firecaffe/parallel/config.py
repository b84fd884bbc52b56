"""The recipe's [parallel] section: which ranks hold one model together, and by what it is split."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from firecaffe.errors import RecipeError

ONE_WEIRD_TRICK = "one_weird_trick"

MOST = 4096
"""The most ranks, and parts."""


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is split over workers.

    Args:
        data: Models, each with samples of its own; 0: as many as there are workers for.
        model: Workers that hold one model together. All workers are data · model.
        split: By what each layer is split, by patterns of layers' names: a row of docs/parallel.md.
            The last pattern that matches decides.
        parts: The parts that a layer is cut into; model must divide it. Part of the result; 0: as
            many as model.
        scheme: What is done with layers that are not split. none: the workers of a model all
            compute the same samples. one_weird_trick: each computes samples of its own, and the
            fully connected layers, which alone are split, exchange them. The result is the same.
    """

    data: int = 0
    model: int = 1
    split: dict[str, str] = field(default_factory=dict)
    parts: int = 0
    scheme: Literal["none", "one_weird_trick"] = "none"

    @property
    def is_split(self) -> bool:
        """Whether layers are cut, if only on one worker."""
        return bool(self.split) or self.scheme == ONE_WEIRD_TRICK

    @property
    def num_parts(self) -> int:
        return self.parts or self.model

    @property
    def shares_samples(self) -> bool:
        """Whether the workers of a model compute the same samples."""
        return self.scheme != ONE_WEIRD_TRICK

    def over(self, data: int, model: int) -> Self:
        """The same split over other workers, which comes to the same bits."""
        return replace(self, data=data, model=model, parts=self.num_parts if self.is_split else 0)


def check_parallel(words: ParallelConfig) -> None:
    """Checks the section. Raises: RecipeError if a word, or two together, are not possible."""
    for word, least in (("data", 0), ("model", 1), ("parts", 0)):
        value = getattr(words, word)
        if not least <= value <= MOST:
            raise RecipeError(f"parallel.{word} is {value}; it must be {least} to {MOST}")
    if words.is_split:
        if words.num_parts % words.model:
            below = words.num_parts // words.model * words.model
            would = f"{below} or {below + words.model}" if below else str(words.model)
            raise RecipeError(
                f"parallel.parts is {words.parts}, which {words.model} workers cannot hold equally "
                f"(parallel.model); take {would}"
            )
        return
    if words.model > 1:
        raise RecipeError(
            f"parallel.model is {words.model}, but no layer is split; say "
            'parallel.split = { "classifier.*" = "neurons" }, or parallel.scheme one_weird_trick'
        )
    if words.parts:
        raise RecipeError(f"parallel.parts is {words.parts}, but no layer is split")
