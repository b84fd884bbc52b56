"""A network in one small file: exact, deterministic, safe to decode; see docs/reference/fcz.md."""

from firecaffe.compression.fcz.read import Opened, read
from firecaffe.compression.fcz.report import FileReport, TensorReport
from firecaffe.compression.fcz.sequence import How
from firecaffe.compression.fcz.write import CODES, write

__all__ = ["CODES", "FileReport", "How", "Opened", "TensorReport", "read", "write"]
