"""`epochs_law`: its page is what it makes, and the product has what it chooses."""

import re
from pathlib import Path

from benchmarks.planner.epochs_law import page, read_tables
from firecaffe.planner.published_trainings import PUBLISHED

PAGE = Path(__file__).parents[3] / "benchmarks" / "results" / "epochs_law.md"


def test_the_page_is_made_by_the_program_and_chooses_the_product_s_form() -> None:
    text = page()
    assert text == PAGE.read_text("utf-8")
    (chosen, ours) = re.findall(r"p = 1, (scatter .+?)\.(?: |$)", text, re.M)
    assert chosen == ours


def test_the_product_has_the_rows_of_the_record() -> None:
    assert list(PUBLISHED["resnet50"].points) == read_tables()["resnet50"]
