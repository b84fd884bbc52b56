"""Description of a slow rank in words."""

from firecaffe.runs.rank_times import Slow


def sentence(slow: Slow, own_part: str = "its own part of a step takes") -> str:
    """Describe a slow rank; `own_part` is the text for a rank that computes slowly."""
    what = (
        f"computes longer than the others: {own_part}"
        if slow.cause == "computes"
        else "has a slow link: round trips with it take"
    )
    return (
        f"rank {slow.rank} {what} {ms(slow.own_s)}, against {ms(slow.others_s)} "
        f"({slow.factor:.2f} times; p = {slow.p_value:.2g}, n = {slow.samples})"
    )


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
