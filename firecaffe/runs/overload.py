"""Finds ranks that had no processor while they had something to compute."""

from firecaffe.runs.rank_times import Rows

LEAST_SHARE = 0.8
"""Below this share other processes take the cores. A rank's own exchange takes less of them."""


def overloaded(timings: Rows) -> dict[int, float]:
    """The share of their computing time with a processor, by rank, of ranks below LEAST_SHARE.

    It is empty for runs on GPUs, and for those that did not record it.
    """
    shares = {}
    for rank, rows in timings.items():
        counted = [row for row in rows[1:] if row.get("processor_s") is not None]
        computed_s = sum(row["compute_s"] for row in counted)
        if computed_s > 0:
            shares[rank] = sum(row["processor_s"] for row in counted) / computed_s
    return {rank: share for rank, share in shares.items() if share < LEAST_SHARE}


def overload_lines(shares: dict[int, float]) -> list[str]:
    if not shares:
        return []
    ranks = ", ".join(map(str, shares))
    low, high = (f"{share:.0%}" for share in (min(shares.values()), max(shares.values())))
    share = low if low == high else f"{low} to {high}"
    return [
        f"the host is overloaded: rank{'s' * (len(shares) > 1)} {ranks} had a processor for "
        f"{share} of the time of computing; more processes are busy than there are cores"
    ]
