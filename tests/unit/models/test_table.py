"""The table of networks: its rows, its errors, and a page of documentation for each."""

from pathlib import Path

import pytest
import torch

from firecaffe.errors import RecipeError
from firecaffe.models import MODELS, build_model
from firecaffe.models.layer_costs import profile

ROOT = Path(__file__).parents[3]


def test_build_model_takes_the_rows_defaults() -> None:
    network = build_model("lenet")
    assert network(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    network = build_model("lenet", num_classes=3, in_channels=3)
    assert network(torch.zeros(1, 3, 28, 28)).shape == (1, 3)


def test_unknown_name_is_answered_with_the_closest_and_all() -> None:
    with pytest.raises(RecipeError) as caught:
        build_model("resnet-50")
    message = str(caught.value)
    assert message.startswith("model.name: no network is called 'resnet-50'")
    assert "did you mean 'resnet50'?" in message
    assert all(name in message for name in MODELS)
    assert "\n" not in message


def test_unknown_name_without_a_close_one() -> None:
    with pytest.raises(RecipeError, match="known: lenet, ") as caught:
        build_model("transformer-xxl")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("num_classes", {"num_classes": 0}), ("in_channels", {"in_channels": -1})],
)
def test_numbers_below_one_are_refused(field: str, arguments: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=rf"^model\.{field}: found .*, must be at least 1"):
        build_model("lenet", **arguments)


@pytest.mark.parametrize("name", MODELS)
def test_page_has_the_row_with_its_counts(name: str) -> None:
    page = (ROOT / MODELS[name].page).read_text()
    input_CHW = MODELS[name].input_CHW
    with torch.device("meta"):
        volumes = profile(build_model(name), input_CHW, 1)
    rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].split("|")[2:-1]]
    assert cells[0] == "x".join(str(n) for n in input_CHW)
    assert cells[1] == str(MODELS[name].num_classes)
    assert cells[2] == f"{volumes.parameters:,}"
    assert cells[3] == f"{volumes.macs / 1e6:,.1f} M"
    assert cells[4] == f"{volumes.weight_bytes / 1e6:,.1f}"
    assert cells[5] == f"{1024 * volumes.data_bytes / 1e6:,.0f}"


def test_every_page_has_its_rows() -> None:
    pages = {f"docs/models/{path.name}" for path in (ROOT / "docs" / "models").glob("*.md")}
    assert pages == {model.page for model in MODELS.values()} | {
        "docs/models/README.md",
        "docs/models/own.md",
    }


@pytest.mark.parametrize("name", MODELS)
def test_the_list_of_networks_links_to_the_page(name: str) -> None:
    page = Path(MODELS[name].page)
    lines = (ROOT / page.parent / "README.md").read_text().splitlines()
    assert [f"({page.name})" in line for line in lines if f"`{name}`" in line] == [True]
