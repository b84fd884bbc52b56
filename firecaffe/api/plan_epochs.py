"""What a plan says of epochs: how many the batch needs, the largest useful batch, and hours."""

import re
from collections.abc import Iterator, Mapping, Sequence

from firecaffe.api.plan_tables import hours_words
from firecaffe.errors import RecipeError
from firecaffe.planner.epochs_law import EpochsLaw, Point
from firecaffe.planner.forecast import Forecast, fastest
from firecaffe.planner.published_epochs import epochs_law_of
from firecaffe.planner.workload import Workload
from firecaffe.resume_advice import option
from firecaffe.user_code import shown

PAIR = re.compile(r"(\d+)=(\d+\.?\d*)")


def own_law(given: str | Mapping[int, float]) -> EpochsLaw | None:
    """Return the law through the user's batches and epochs; None for none. Raises: RecipeError."""
    if not given:
        return None
    texts = given.split(",") if isinstance(given, str) else [f"{b}={e}" for b, e in given.items()]
    pairs = [PAIR.fullmatch(text) for text in texts]
    if None in pairs:
        raise RecipeError(
            f"{option('epochs')} is {shown(given)}; it must be batches and their epochs to your "
            "target accuracy, as 128=30,1024=36"
        )
    points = tuple(Point(int(pair[1]), float(pair[2])) for pair in pairs if pair)
    try:
        return EpochsLaw("your target accuracy", points, option("epochs"))
    except RecipeError as error:
        raise RecipeError(f"{option('epochs')}: {error}") from None


def epochs_words(work: Workload, rows: Sequence[Forecast]) -> Iterator[str]:
    """Yield sentences on the epochs of the workload's batch; none if no law is known."""
    law = epochs_law_of(work)
    if law is None:
        return
    at = law.epochs_at(work.global_batch_size)
    least, most = law.range
    known = f"{at.epochs:.3g} ({at.low:.3g} to {at.high:.3g})" if at.high else f"{at.epochs:.3g}"
    yield (
        f"To {law.target}: {'at least ' * at.is_at_least}{known} epochs at batch "
        f"{work.global_batch_size:,}, from {len(law.points)} batches ({law.source})."
        + f" Nothing is known beyond {least:,.0f} to {most:,.0f}."
        * at.is_at_least
    )
    yield _largest_useful(law)
    hours = [(row.workers, row.hours_to_accuracy) for row in fastest(rows)]
    said = [f"{workers}: {hours_words(hour)}" for workers, hour in hours if hour is not None]
    if said:
        least_word = " (at least)" * at.is_at_least
        yield f"Time to {law.target}{least_word}, by workers: {', '.join(said)}."


def _largest_useful(law: EpochsLaw) -> str:
    least, most = law.range
    if law.b_crit > most:
        return (
            f"Largest useful batch: above {most:,.0f}, which needs less than twice the epochs of a "
            f"small one ({law.e_min:.3g})."
        )
    if law.b_crit < least:
        return (
            f"Largest useful batch: below {least:,.0f}. From there on epochs grow with the batch, "
            "so that a larger one saves little time."
        )
    return (
        f"Largest useful batch: about {law.b_crit:,.0f}, which needs twice the epochs of a small "
        f"one ({law.e_min:.3g})."
    )
