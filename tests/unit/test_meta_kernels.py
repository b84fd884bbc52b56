"""torch's compiler is not loaded for shapes, and is there for whoever asks for it afterwards."""

import subprocess
import sys
from types import ModuleType

import pytest

from firecaffe.meta_kernels import NAME, without_compiler

SHAPES = """
import gc, sys, torch
from firecaffe.models import build_model
from firecaffe.meta_kernels import on_meta
from firecaffe.models.layer_costs import profile

with on_meta():
    network = build_model("googlenet")
    torch.nn.init.normal_(next(network.parameters()), generator=None)
    torch.nn.init.uniform_(tensor=next(network.parameters()))
assert "sympy" not in sys.modules
in_memory = torch.empty(3)
with on_meta():
    torch.nn.init.uniform_(in_memory, 1, 2)
assert in_memory.min() >= 1
profile(network, (3, 224, 224), 2)
assert "torch._dynamo" not in sys.modules
words = (getattr(each, "__dict__", ()) for each in gc.get_objects())
assert not [each for each in words if "__dynamo_disable" in each]
double = torch.compile(lambda x: x + x, backend="eager")
assert double(torch.ones(2)).tolist() == [2, 2]
assert torch._dynamo.utils.counters["stats"]["calls_captured"] == 1
"""

ASKED_FOR_MORE = """
import sys
from firecaffe.meta_kernels import NAME, without_compiler

with without_compiler():
    stand_in = sys.modules[NAME]
    stand_in.graph_break()
    assert stand_in.disable(without_compiler, wrapping=False) is without_compiler
    assert stand_in.is_compiling() is False
    compiler = sys.modules[NAME]
    assert compiler is not stand_in
assert sys.modules[NAME] is compiler
"""


EACH_ALONE = """
import os, sys, torch
for script in sys.argv[1:]:
    if (child := os.fork()) == 0:
        exec(script, {})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, script
"""


def test_shapes_do_not_load_it_and_it_compiles_afterwards() -> None:
    """In processes of their own, for here others may have loaded it; torch is loaded once."""
    subprocess.run([sys.executable, "-c", EACH_ALONE, SHAPES, ASKED_FOR_MORE], check=True)


def test_one_that_is_loaded_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, loaded)
    with without_compiler():
        assert sys.modules[NAME] is loaded
    assert sys.modules[NAME] is loaded
