"""A plug-in that kills rank 0 of the first attempt when it has made the run's folder, and nobody
knows yet.
"""

import os
import signal
from unittest.mock import patch

from firecaffe.training import training_folder
from firecaffe.training.plugins import Plugin


def plugin() -> Plugin:
    if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        patch.object(training_folder, "write_about", _killed).start()
    return Plugin()


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
