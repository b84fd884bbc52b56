"""A network in one small file: exact, deterministic, safe to decode; see docs/reference/fcz.md."""

from firecaffe.compression.fcz.network_file import (
    CODES,
    FczFile,
    FileReport,
    TensorReport,
    read,
    write,
)
from firecaffe.compression.fcz.sequence import How

__all__ = ["CODES", "FczFile", "FileReport", "How", "TensorReport", "read", "write"]
