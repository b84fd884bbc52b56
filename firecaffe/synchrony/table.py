"""The policies of the modes with a server."""

from collections.abc import Callable

from firecaffe.synchrony.asynchronous import Asynchronous
from firecaffe.synchrony.backup import Backup, BackupAgain
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, STALE, SynchronyConfig
from firecaffe.synchrony.leaves import LeafQueue, Leaves
from firecaffe.synchrony.policy import Policy
from firecaffe.synchrony.stale import Stale

SYNCHRONY: dict[str, Callable[[LeafQueue, SynchronyConfig, int], Policy]] = {
    BACKUP: lambda queue, c, learners: (BackupAgain if c.dropped == "again" else Backup)(
        queue, learners, queue.leaves.first_step, c.backup_workers
    ),
    STALE: lambda queue, c, learners: Stale(
        queue, learners, queue.leaves.first_step, c.max_staleness
    ),
    ASYNCHRONOUS: lambda queue, c, learners: Asynchronous(
        queue, learners, queue.leaves.first_step, c.gradients_per_update
    ),
}
"""By `synchrony.mode`. The version counts all updates, those of the warm steps too."""


def make_policy(config: SynchronyConfig, leaves: Leaves, learners: int) -> Policy:
    """The policy of a mode with a server, at its start, for so many learners."""
    return SYNCHRONY[config.mode](LeafQueue(leaves), config, learners)
