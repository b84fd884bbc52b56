"""What a mode with a server says of the way of its gradients."""

from types import SimpleNamespace
from typing import Any

import pytest

from firecaffe.synchrony.server_policies import Leaves
from firecaffe.training.modes.served.served_mode import Served


@pytest.mark.parametrize(
    ("warm_steps", "said"),
    [(0, "with a server, backup"), (3, "with a server, backup; in warm steps ring")],
)
def test_gradients_go_to_the_server(warm_steps: int, said: str) -> None:
    """Not by the exchange, which only the steps before it use."""
    served = Served.__new__(Served)  # of which the answer needs one attribute
    served.leaves = Leaves(warm_steps, 10, 1, 1, 1)
    run: Any = SimpleNamespace(recipe=SimpleNamespace(synchrony=SimpleNamespace(mode="backup")))
    assert served.exchange_words(run, "ring") == said
