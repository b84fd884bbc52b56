"""A net of Caffe's as the recipe's data."""

from pathlib import Path

from firecaffe.data import DataConfig


def net(folder: Path, text: str) -> DataConfig:
    """The net of that text, in the current folder."""
    (folder / "net.prototxt").write_text(text)
    return DataConfig(name="caffe:net.prototxt")
