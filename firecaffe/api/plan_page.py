"""`firecaffe plan --html`: one file with sliders over forecasts, and pictures of them."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from firecaffe.api.plan_grid import page_values
from firecaffe.api.plan_links import Choice
from firecaffe.api.plan_tables import assumptions
from firecaffe.files import write_atomically
from firecaffe.planner.advice import paragraph

AXES = {
    "link": ("Link", "links"),
    "workers": ("Workers", "workers"),
    "batch": ("Batch", "batches"),
    "precision": ("Precision", "precisions"),
}
"""The sliders: by id, the label and the list of its values."""


def write_page(path: Path, choice: Choice, is_offered: bool) -> None:
    """Write the page of a training. is_offered: whether the clusters are links of one device."""
    if is_offered:
        link = choice.number_for(len(choice.workers) - 1)
        text = page(choice, link, choice.sentences, choice.assumptions)
    else:
        of_all = [(choice.work, cluster, rows) for cluster, rows in choice.offers]
        sentences = [f"{on.name}: {paragraph(work, on, rows)}" for work, on, rows in of_all]
        notes = dict.fromkeys(note for training in of_all for note in assumptions(*training, None))
        text = page(choice, 0, sentences, list(notes))
    write_atomically(path, text)


def page(choice: Choice, link: int, sentences: Sequence[str], notes: Sequence[str]) -> str:
    """Return the page as HTML that needs no other file. link: the one that is shown first."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("plan_page.html.jinja").read_text("utf-8")
    values = page_values(choice, link)
    return environment.from_string(template).render(
        choice=choice,
        sentences=sentences,
        notes=notes,
        sliders=[
            (key, label, len(values[name]) - 1, at)
            for (key, (label, name)), at in zip(AXES.items(), values["start"], strict=True)
        ],
        values=Markup(json.dumps(values).replace("<", "\\u003c")),
    )
