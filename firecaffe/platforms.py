"""The operating systems on which firecaffe can run."""

import sys


def why_not(system: str = sys.platform) -> str:
    """Return in one line why firecaffe cannot run on a system; empty if it can."""
    if system == "win32":
        return "Windows - the file locks and signals that firecaffe needs are Unix's - use WSL 2"
    return ""
