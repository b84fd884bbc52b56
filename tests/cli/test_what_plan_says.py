"""What `firecaffe plan` says of its own figures, and what it leaves out."""

from pathlib import Path

from tests.cli.test_plan import ALEXNET, BATCH_OF_32, RECIPE, plan, planned


def test_no_codec_is_planned_in_silence() -> None:
    """Cells that a codec has made say so, and codecs that the table leaves out are named."""
    words = [*ALEXNET, "--device", "a100", "--links", "1", "--workers", "8", *BATCH_OF_32]
    for codec, is_noted in (("int8", True), ("none", False)):
        _, out, _ = plan(*words, "--compressors", codec)
        assert ("cost in accuracy is not forecast" in " ".join(out.split())) == is_noted
    (found,) = planned(str(RECIPE), "--workers", "2", "--compressors", "all")
    of_codecs = {row["compressor"] for row in found["rows"]} - {"none"}
    for more, is_noted in (((), True), (("--all",), False)):
        _, out, _ = plan(str(RECIPE), "--workers", "2", "--compressors", "all", *more)
        (note,) = [line for line in out.splitlines() if "not among the fastest" in line] or [""]
        assert bool(note) == is_noted
        assert not note or all(codec in note for codec in of_codecs)


def test_a_table_by_data_says_so_beside_a_recipe_with_stages() -> None:
    words = [str(RECIPE), "--workers", "1,2"]
    for more, is_noted in (((), False), (("--parallel.stages", '["conv2"]'), True)):
        code, out, err = plan(*words, *more)
        assert code == 0, err
        assert ("of training by data" in " ".join(out.split())) == is_noted
        assert ("of training by data" in planned(*words, *more)[0]["assumption"]) == is_noted


def test_equal_ways_are_not_called_faster_and_slower() -> None:
    """GoogLeNet's exchange on one DGX is hidden, whichever it is."""
    recipe = RECIPE.with_name("googlenet_imagenet_b1024.toml")
    (found,) = planned(str(recipe), "--cluster", "dgx-h100", "--workers", "1,8")
    assert "would be faster" not in found["advice"]
    assert "is as fast." in found["advice"]


def test_what_is_written_is_said(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    _, out, _ = plan(str(RECIPE), "--workers", "1,2", "--html", str(page))
    assert f"wrote {page}" in out.replace("\n", "")
