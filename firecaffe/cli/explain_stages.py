"""The part of `firecaffe explain` for a network in stages."""

from collections.abc import Sequence

from firecaffe.cli.explain_words import ms
from firecaffe.parallel.pipeline import idle_share
from firecaffe.runs.explain_stages import StageTimes


def stage_lines(stages: Sequence[StageTimes]) -> list[str]:
    """Return which stage has the most work and how long each idles; empty without stages."""
    if not stages:
        return []
    most = max(stages, key=lambda each: each.own_s)
    own = ", ".join(ms(stage.own_s) for stage in stages)
    idle = ", ".join(f"{stage.idle:.0%}" for stage in stages)
    count, micro_batches = len(stages), stages[0].micro_batches
    expected = float(idle_share(count, micro_batches))
    return [
        f"stages: stage {most.stage} has the most work, and sets the pace: in a step they take "
        f"{own}, and idle for {idle}",
        f"stages: {count} of equal work, with {micro_batches} micro-batches a step and messages "
        f"that take no time, idle for {expected:.0%} each",
    ]
