"""The recipe's [parallel] section: which ranks hold one model together, and by what it is split, or
in which stages it is.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from firecaffe.errors import RecipeError

ONE_WEIRD_TRICK = "one_weird_trick"
AT_ONCE: Literal["at_once"] = "at_once"
IN_TURN: Literal["in_turn"] = "in_turn"
AUTO = "auto"

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
            fully connected layers, which alone are split, exchange them. auto: the planner chooses
            model and one of these for the workers that there are. The result is the same.
        stages: The modules with which stages begin, as "features.6", in the order of the network's
            calls: a worker for each stage holds one model. The result is the same.
        pipeline: In which order a stage computes. 1f1b: one forward and one backward in turn.
            gpipe: forward of all micro-batches, then backward of all. The result is the same.
        head_updates: How often the layers that are split are updated in a step, by one weird
            trick: update g by the micro-batches whose numbers are g modulo this. Part of the
            result.
        exchange: How workers of several hosts exchange samples by one weird trick. at_once: they
            wait for all, then compute. in_turn: they compute with each as it comes, their own
            first. The result is the same.
    """

    data: int = 0
    model: int = 1
    split: dict[str, str] = field(default_factory=dict)
    parts: int = 0
    scheme: Literal["none", "one_weird_trick", "auto"] = "none"
    stages: list[str] = field(default_factory=list)
    pipeline: Literal["1f1b", "gpipe"] = "1f1b"
    head_updates: int = 1
    exchange: Literal["at_once", "in_turn"] = AT_ONCE

    @property
    def is_split(self) -> bool:
        """Whether layers are cut, if only on one worker."""
        return bool(self.split) or self.scheme in (ONE_WEIRD_TRICK, AUTO)

    @property
    def word(self) -> str:
        """What the recipe says of a model that several workers hold, as errors name it."""
        if self.stages:
            return "parallel.stages"
        return "parallel.split" if self.split else f"parallel.scheme {self.scheme}"

    @property
    def num_parts(self) -> int:
        return self.parts or self.model

    @property
    def row_size(self) -> int:
        """Workers that hold one model together."""
        return len(self.stages) + 1 if self.stages else self.model

    @property
    def shares_samples(self) -> bool:
        """Whether the workers of a model compute the same samples."""
        return self.scheme != ONE_WEIRD_TRICK

    def over(self, data: int, model: int) -> Self:
        """The same split over other workers, without stages, which comes to the same bits."""
        parts, scheme = self.num_parts if self.is_split else 0, self.scheme
        if scheme == AUTO:  # which would choose other workers
            scheme = "none" if self.split else "one_weird_trick"
        return replace(self, data=data, model=model, parts=parts, scheme=scheme, stages=[])

    def in_stages(self, data: int, stages: int) -> Self:
        """So many models in so many stages, each of several that follow each other; the same bits.

        Raises: RecipeError if these stages do not come to so many.
        """
        own = len(self.stages) + 1
        if own % stages:
            raise RecipeError(
                f"parallel.stages names {own} stages, of which no {stages} can be made that are "
                f"equally many each; {own} must be a multiple"
            )
        each = own // stages
        return replace(self, data=data, model=1, stages=self.stages[each - 1 :: each])


def check_parallel(words: ParallelConfig) -> None:
    """Checks the section. Raises: RecipeError if a word, or two together, are not possible."""
    for word, least in (("data", 0), ("model", 1), ("parts", 0), ("head_updates", 1)):
        value = getattr(words, word)
        if not least <= value <= MOST:
            raise RecipeError(f"parallel.{word} is {value}; it must be {least} to {MOST}")
    if words.head_updates > 1 and words.shares_samples:
        raise RecipeError(
            f"parallel.head_updates is {words.head_updates} with parallel.scheme {words.scheme}: "
            "the fully connected layers have updates of their own by one_weird_trick alone"
        )
    if words.exchange != AT_ONCE and words.shares_samples:
        raise RecipeError(
            f"parallel.exchange is {words.exchange} with parallel.scheme {words.scheme}: samples "
            "are exchanged by one_weird_trick alone"
        )
    if words.stages:
        _check_stages(words)
        return
    if words.scheme == AUTO:
        _check_auto(words)
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


def _check_auto(words: ParallelConfig) -> None:
    if not words.parts:
        raise RecipeError(
            "parallel.scheme auto needs parallel.parts: the number of parts decides bits, and what "
            "is chosen must not; say one that numbers of workers divide, as parts = 4"
        )
    if words.data or words.model > 1:
        word, value = ("data", words.data) if words.data else ("model", words.model)
        raise RecipeError(
            f"parallel.{word} is {value} with parallel.scheme auto, which chooses it; leave one of "
            "them out"
        )


def _check_stages(words: ParallelConfig) -> None:
    if words.is_split:
        which = "split" if words.split else f"scheme {words.scheme}"
        raise RecipeError(
            f"parallel.stages and parallel.{which}: a stage's layers cannot be split yet; leave "
            "one of them out"
        )
    twice = next((each for each in words.stages if words.stages.count(each) > 1), None)
    if twice is not None:
        raise RecipeError(f"parallel.stages has {twice!r} twice; a stage begins there once")
    if words.model not in (1, words.row_size):
        raise RecipeError(
            f"parallel.model is {words.model}, but parallel.stages names {words.row_size} stages, "
            "a worker each; leave parallel.model out"
        )
    if words.parts:
        raise RecipeError(f"parallel.parts is {words.parts}, but no layer is split")
