"""The picture of which rank holds what: as docs/explanation/splitting.md shows it, and by hand."""

from pathlib import Path

import pytest

from firecaffe.api.plan_layouts import Parallel, held
from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecasts
from firecaffe.planner.layouts import LayerLayout
from firecaffe.planner.recipe_layout import RecipeLayout
from firecaffe.planner.recipe_workload import workload_of_model

PAGE = (Path(__file__).parents[3] / "docs/explanation/splitting.md").read_text()
HEAD = {"classifier.0": "neurons", "classifier.3": "inputs", "classifier.6": "neurons"}


def picture(words: ParallelConfig, workers: int) -> list[str]:
    config, cluster = ModelConfig("alexnet"), load_cluster("ethernet-10g")
    work = workload_of_model(config, None, 256, 8)
    rows = forecasts(work, cluster, [workers], ["ring"])
    found = Parallel(config, work, cluster, rows, [], RecipeLayout(words, words.split))
    return found.picture().splitlines()


STAGES = """
layers                       by       rank 0  rank 1  rank 2  rank 3  rank 4  rank 5  samples  gradients
features.0 … features.7      stage 0  █       ·       ·       █       ·       ·       of 3     2 workers
  ↕ 43,264 numbers a sample, 43,264 back
features.8 … features.14     stage 1  ·       █       ·       ·       █       ·       of 3     2 workers
  ↕ 9,216 numbers a sample, 9,216 back
classifier.0 … classifier.6  stage 2  ·       ·       █       ·       ·       █       of 3     2 workers
"""  # noqa: E501


def test_the_picture_of_the_page() -> None:
    lines = picture(ParallelConfig(0, 2, HEAD, 4, "one_weird_trick"), 4)
    assert "\n".join(f"    {line}" for line in lines[1:]) in PAGE


def test_the_picture_of_stages() -> None:
    lines = picture(ParallelConfig(2, stages=["features.8", "classifier"]), 6)
    assert lines[1:] == STAGES.strip().splitlines()


def test_parts_of_ranks() -> None:
    lines = picture(ParallelConfig(1, 2, {"classifier.3": "inputs"}, 4), 2)
    [held] = [line.split() for line in lines if line.startswith("classifier.3")]
    assert held == ["classifier.3", "inputs", "██··", "··██", "of", "2", "-"]
    whole = [line.split() for line in lines if "██" in line and not line.startswith("classifier.3")]
    assert [line[0] for line in whole] == ["features.0", "classifier.6"]
    assert whole[0][1:7] == ["…", "classifier.0", "-", "████", "████", "of"]
    # Columns of the input are cut out of what all have; the sum of outputs goes to all.
    assert sum("↕" in line for line in lines) == 2


def test_a_layer_that_is_cut_both_ways() -> None:
    """Rank 1 has the other outputs, rank 2 the other inputs."""
    cells = [held(LayerLayout(1, outputs=2, inputs=2), rank) for rank in range(4)]
    assert cells == ["█···", "··█·", "·█··", "···█"]


def test_rows_are_of_whole_weights() -> None:
    lines = picture(ParallelConfig(1, 2, {"features.12": "rows", "classifier.0": "inputs"}, 4), 2)
    at = next(i for i, line in enumerate(lines) if line.startswith("features.12"))
    assert lines[at].split()[:4] == ["features.12", "rows", "████", "████"]
    assert "halos and sums of gradients" in lines[at + 1]
    assert "activations" in lines[at + 2]  # the pool's rows, gathered; then columns are cut out


def test_too_many_ranks() -> None:
    words = ParallelConfig(0, 2, HEAD, 2)
    with pytest.raises(RecipeError, match="draw shows at most 16 workers; found 32"):
        picture(words, 32)
