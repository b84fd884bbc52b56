"""The recipe's [parallel] section: which ranks hold one model together, split or in stages."""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from firecaffe.errors import RecipeError
from firecaffe.value_checks import check_limits

ONE_WEIRD_TRICK: Literal["one_weird_trick"] = "one_weird_trick"
AUTO = "auto"

MOST = 4096


WHOLE, LAYERS, STAGES = "whole", "layers", "stages"
LAYERS_OF_OWN_SAMPLES = "layers of own samples"


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is split over workers.

    Args:
        data: Models, each with samples of its own; 0: as many as there are workers for.
        model: Workers that hold one model together; with stages whose layers are split, those that
            hold one stage. All workers are data · model, times the number of stages.
        split: How each layer is split, by patterns of layers' names
            (docs/explanation/splitting.md). The last pattern that matches decides.
        parts: Parts that a layer is cut into; model must divide it. They decide the result. 0: as
            many as model.
        scheme: How layers that are not split are computed. none: the workers of a model all compute
            the same samples. one_weird_trick: each computes samples of its own, and the fully
            connected layers, which alone are split, exchange them. auto: the planner chooses model
            and one of these for the present workers. The result is the same.
        stages: Modules with which stages begin, as "features.6", in the order of the network's
            calls; a worker for each, or `model` of them, hold one model. The result is the same.
        pipeline: The order in which a stage computes. 1f1b: one forward and one backward in turn.
            gpipe: forward of all micro-batches, then backward of all. The result is the same.
    """

    data: int = 0
    model: int = 1
    split: dict[str, str] = field(default_factory=dict)
    parts: int = 0
    scheme: Literal["none", "one_weird_trick", "auto"] = "none"
    stages: list[str] = field(default_factory=list)
    pipeline: Literal["1f1b", "gpipe"] = "1f1b"

    @property
    def holding(self) -> str:
        """Which part of a model a worker holds, as a key of `training.choices.HOLDINGS`."""
        if self.stages:
            return STAGES
        if not self.is_split:
            return WHOLE
        return LAYERS if self.shares_samples else LAYERS_OF_OWN_SAMPLES

    @property
    def is_split(self) -> bool:
        """Whether layers are cut, even if on one worker only."""
        return bool(self.split) or self.scheme in (ONE_WEIRD_TRICK, AUTO)

    @property
    def is_whole(self) -> bool:
        """Whether each worker holds the whole network."""
        return self.holding == WHOLE

    @property
    def word(self) -> str:
        """The setting that splits the network, as errors name it."""
        return "parallel.split" if self.split else f"parallel.scheme {self.scheme}"

    @property
    def num_parts(self) -> int:
        """The parts of a split layer; they decide the bits."""
        return self.parts or self.model

    @property
    def row_size(self) -> int:
        """The number of workers that hold one model together."""
        return self.num_stages * (self.model if self.is_split else 1)

    @property
    def num_stages(self) -> int:
        """The number of stages; 1 for a network in one."""
        return len(self.stages) + 1

    @property
    def shares_samples(self) -> bool:
        """Whether the workers of one model compute the same samples."""
        return self.scheme != ONE_WEIRD_TRICK

    def over(self, data: int, model: int) -> Self:
        """Return the same split over other workers, without stages. It gives equal bits."""
        parts, scheme = self.num_parts if self.is_split else 0, self.scheme
        if scheme == AUTO:  # which would choose other workers
            scheme = "none" if self.split else "one_weird_trick"
        return replace(self, data=data, model=model, parts=parts, scheme=scheme, stages=[])

    def in_stages(self, data: int, stages: int) -> Self:
        """Join the stages to so many of equal length, with equal bits. Raises: RecipeError."""
        num_stages = len(self.stages) + 1
        if num_stages % stages:
            raise RecipeError(
                f"parallel.stages names {num_stages} stages, of which no {stages} can be made that "
                f"are equally many each; {num_stages} must be a multiple"
            )
        length, parts = num_stages // stages, self.num_parts if self.is_split else 0
        begins = self.stages[length - 1 :: length]
        return replace(self, data=data, model=1, parts=parts, stages=begins)


def check_parallel(words: ParallelConfig) -> None:
    limits = {"data": (0, MOST), "model": (1, MOST), "parts": (0, MOST)}
    check_limits("parallel", words, limits)
    twice = next((stage for stage in words.stages if words.stages.count(stage) > 1), None)
    if twice is not None:
        raise RecipeError(f"parallel.stages has {twice!r} twice; a stage begins there once")
