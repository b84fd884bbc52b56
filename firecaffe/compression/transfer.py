"""The time that a network's weights take over a link, as a .fcz file and as float32."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINKS: Mapping[str, float] = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9}

SLOWEST = "10 Mbit/s"
"""The link that is reported if there is space for only one."""

BYTES_PER_WEIGHT = 4
"""The size of a float32. A ratio is the size of all weights over that of the whole file."""


@dataclass(frozen=True)
class FileTransfer:
    path: str
    file_bytes: int
    float_bytes: int

    def seconds(self, bits_per_s: float) -> dict[str, float]:
        return {
            "float": seconds(self.float_bytes, bits_per_s),
            "file": seconds(self.file_bytes, bits_per_s),
        }

    def words(self, links: Mapping[str, float]) -> list[str]:
        ratio = self.float_bytes / self.file_bytes
        said = [
            f"{self.path}: {self.file_bytes:,} bytes, {ratio:.1f} times fewer than "
            f"{self.float_bytes:,} as float32"
        ]
        for name, bits_per_s in links.items():
            times = self.seconds(bits_per_s)
            said.append(f"over {name}: {times['file']:.3g} s instead of {times['float']:.3g} s")
        return said

    def as_dict(self, links: Mapping[str, float]) -> dict[str, Any]:
        return {
            "path": self.path,
            "file_bytes": self.file_bytes,
            "float_bytes": self.float_bytes,
            "seconds": {name: self.seconds(bits_per_s) for name, bits_per_s in links.items()},
        }


def transfer_of(path: Path) -> FileTransfer:
    """Read only the header and decode nothing. Raises CheckpointError if it is no .fcz file."""
    from firecaffe.compression import fcz  # imported only if used: it needs a coder

    with fcz.read(path) as opened:
        weights = sum(outline.size for outline in opened.outlines)
    return FileTransfer(str(path), path.stat().st_size, BYTES_PER_WEIGHT * weights)


def seconds(num_bytes: float, bits_per_s: float = LINKS[SLOWEST]) -> float:
    return num_bytes * 8 / bits_per_s
