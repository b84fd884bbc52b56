"""What may be done about a training that diverges because not all compute together, in words."""

from firecaffe.synchrony.config import BACKUP, SynchronyConfig


def for_server(words: SynchronyConfig, learners: int, staleness: float, momentum: float) -> str:
    """How the updates are made, and what to try.

    Args:
        words: The section.
        learners: How many there are.
        staleness: Of the last gradients, the mean.
        momentum: Of the solver; 0 if it has none.
    """
    mode = f"synchrony.mode {words.mode}"
    if words.mode == BACKUP:
        return (
            f"updates are means over the micro-batches of a step but {words.backup_workers}, in "
            f"{mode}, with momentum {momentum:g}: try a lower rate or momentum"
        )
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
        f"gradients of {learners} learners come late in {mode}, by {staleness:.2f} updates in the "
        f"mean of the last, with momentum {momentum:g} {how}: try a lower rate or momentum{more}"
    )


def for_replicas(words: SynchronyConfig, momentum: float) -> str:
    """How replicas train, and what to try. momentum: of the solver; 0 if it has none."""
    shorter = f", shorter rounds than synchrony.local_steps {words.local_steps}"
    outer = ", a lower synchrony.outer_lr" if words.outer != "average" else ""
    return (
        f"{words.replicas} replicas train by themselves between averages (synchrony.outer "
        f"{words.outer}), with momentum {momentum:g}: try a lower rate or momentum"
        f"{shorter if words.local_steps > 1 else ''}{outer}"
    )
