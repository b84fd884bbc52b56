"""The files of a network as a picture: what is lost against the ratio."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firecaffe.cli.picture import load_pyplot, write_picture


def plot_sizes(path: Path, record: Mapping[str, Any]) -> None:
    """Draws all sizes that were made of the network, for whatever target.

    Raises: RecipeError if matplotlib is missing.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    ratios = [each["ratio"] for each in record["sizes"]]
    for part, words in (("held_out", "held-out samples"), ("test", "test samples")):
        lost = [each["lost"][part] for each in record["sizes"]]
        if None not in lost:
            axes.plot(ratios, lost, marker="o", label=words)
    axes.axhline(0, color="gray", linestyle=":", label="float network")
    unit = "points of " if record["is_share"] else ""
    axes.set(
        xscale="log",
        xlabel="4 bytes a weight / bytes of the whole file",
        ylabel=f"{unit}{record['metric']} lost",
        title=f"{record['network']}, {record['scheme']}",
    )
    axes.legend()
    write_picture(path, figure, "firecaffe compress", "what is lost against the ratio")
    pyplot.close(figure)
