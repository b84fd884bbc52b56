"""What may be done about a training that diverges because not all compute together, in words."""

from collections.abc import Callable

from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, STALE, SynchronyConfig


def for_server(words: SynchronyConfig, learners: int, staleness: float, momentum: float) -> str:
    """How the updates are made, and what to try.

    Args:
        words: The section.
        learners: How many there are.
        staleness: Of the last gradients, the mean.
        momentum: Of the solver; 0 if it has none.
    """
    return ADVICE[words.mode](words, learners, staleness, momentum)


def _for_backup(words: SynchronyConfig, _: int, __: float, momentum: float) -> str:
    return (
        f"updates are means over the micro-batches of a step but {words.backup_workers}, in "
        f"synchrony.mode {words.mode}, with momentum {momentum:g}: try a lower rate or momentum"
    )


def _for_late(words: SynchronyConfig, learners: int, staleness: float, momentum: float) -> str:
    is_delayed = words.server_momentum == "delayed_nesterov"
    has_server = not words.is_lockless  # that has the updates in its hands
    tries = {
        "staleness_rate inverse": words.staleness_rate == "none" and has_server,
        "server_momentum delayed_nesterov": momentum > 0 and not is_delayed and has_server,
        "warm_steps": not words.warm_steps,
    }
    left = [word for word, is_open in tries.items() if is_open]
    more = f", synchrony.{', or '.join(left)}" if left else ""
    how = "that is delayed" if is_delayed else "in each update"
    return (
        f"gradients of {learners} learners come late in synchrony.mode {words.mode}, by "
        f"{staleness:.2f} updates in the mean of the last, with momentum {momentum:g} {how}: try a "
        f"lower rate or momentum{more}"
    )


ADVICE: dict[str, Callable[[SynchronyConfig, int, float, float], str]] = {
    BACKUP: _for_backup,
    STALE: _for_late,
    ASYNCHRONOUS: _for_late,
}
"""By synchrony.mode; the arguments as of `for_server`."""


def for_replicas(words: SynchronyConfig, momentum: float) -> str:
    """How replicas train, and what to try. momentum: of the solver; 0 if it has none."""
    shorter = f", shorter rounds than synchrony.local_steps {words.local_steps}"
    outer = ", a lower synchrony.outer_lr" if words.outer != "average" else ""
    return (
        f"{words.replicas} replicas train by themselves between averages (synchrony.outer "
        f"{words.outer}), with momentum {momentum:g}: try a lower rate or momentum"
        f"{shorter if words.local_steps > 1 else ''}{outer}"
    )
