"""What a mode with a server says of the way of its gradients."""

from types import SimpleNamespace
from typing import Any

import pytest

from firecaffe.training.served.build_served import ServedParts


@pytest.mark.parametrize(
    ("warm_steps", "said"),
    [(0, "with a server, backup"), (3, "with a server, backup; in warm steps ring")],
)
def test_gradients_go_to_the_server(warm_steps: int, said: str) -> None:
    """Not by the exchange, which only the steps before it use."""
    served: Any = SimpleNamespace(leaves=SimpleNamespace(first_step=warm_steps))
    update: Any = SimpleNamespace(holding=None)
    run: Any = SimpleNamespace(recipe=SimpleNamespace(synchrony=SimpleNamespace(mode="backup")))
    assert ServedParts(update, served).exchange_words(run, "ring") == said
