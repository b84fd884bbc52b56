"""The explanation of a run in mode local: the cost of its averages."""

from pathlib import Path
from statistics import fmean

from firecaffe.runs.rank_times import Rows
from firecaffe.runs.run_folder import RECIPE, read_run_file, read_run_recipe
from firecaffe.synchrony.config import LOCAL


def is_local(folder: Path) -> bool:
    """Whether a run's recipe has mode local; False without a recipe. Raises RunError."""
    if not (folder / RECIPE).exists():
        return False
    return read_run_recipe(folder).get("synchrony", {}).get("mode") == LOCAL  # type: ignore[no-any-return]


def local_lines(folder: Path, timings: Rows) -> list[str]:
    """Describe the averages. Times are the longest of the ranks' means. Raises RunError."""
    said, sent = list[str](), list[float]()
    if (folder / "result.json").is_file():
        result = read_run_file(folder, "result.json")
        row = result.get("synchrony") or {}
        said.append(f"{row.get('replicas')} replicas, {row.get('averages')} averages")
        by_rank = result.get("sent_bytes_per_step_by_rank") or []
        sent = [of_rank for of_rank in by_rank if of_rank]  # none if one rank hosts all
    averaging = [
        averages
        for rows in timings.values()
        if (averages := [r for r in rows if r.get("exchange_s")])
    ]
    if averaging:
        took_s, waited_s = (
            max(fmean(row[word] for row in averages) for averages in averaging)
            for word in ("exchange_s", "exposed_communication_s")
        )
        said.append(
            f"by the means of the ranks, an average takes at most {took_s * 1e3:,.1f} ms, and is "
            f"waited for at most {waited_s * 1e3:,.1f} ms"
        )
    return [*said, f"a rank sends {max(sent) / 1e6:,.3g} MB a step"] if sent else said
