"""What all tests share: small worlds of real ranks, emulated clusters, and that nothing is left."""

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import settings

from benchmarks.emulated.namespaces import ClusterUnavailableError
from benchmarks.emulated.virtual_cluster import VirtualCluster
from tests import few_images, order
from tests.world import Ranks

# How long an example takes says how busy the machine is.
settings.register_profile("firecaffe", deadline=None)
settings.load_profile("firecaffe")

# Under nohup it is ignored, and would be by all that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# torch's store asks for the name of each address that it connects to. A name server that answers
# none of these would hold up each world for five seconds or ten.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

gc.disable()  # until tests are collected
assert few_images.TEST_IMAGES  # loaded, so that this process has the data that its ranks have


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # which loads no tests
        gc.enable()
    if worker := getattr(config, "workerinput", None):
        process = int(str(worker["workerid"]).removeprefix("gw"))
        config.args = order.turned(config.args, process, worker["workercount"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = order.in_order(items)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was loaded is not looked through again, in each of the tests' collections
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return order.processes()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("numprocesses", None):
        reports = [report for each in terminalreporter.stats.values() for report in each]
        of_tests = (report for report in reports if isinstance(report, pytest.TestReport))
        terminalreporter.section("slowest files")
        for line in order.slowest(of_tests):
            terminalreporter.write_line(line)


LAUNCHED = re.compile(r"(FIRECAFFE|GLOO|GROUP|LOCAL|MASTER|TORCHELASTIC)_|(RANK|WORLD_SIZE)$")
"""Variables by which a process is a rank, or a launcher."""


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group, a variable that makes a rank of a process, or a user's own.py that was
    imported would be that of the tests after this one, too: which these are is chance.
    """
    before, modules = launched(), set(sys.modules)
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(temporary):
            del sys.modules[name]
    sys.path[:] = [each for each in sys.path if not each.startswith(temporary)]
    after = launched()
    for name in after:
        del os.environ[name]
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group; destroy it in the test", pytrace=False)
    if changed := sorted(dict(before.items() ^ after.items())):
        said = ", ".join(changed)
        pytest.fail(f"the test left other values of {said}; use monkeypatch", pytrace=False)


def launched() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if LAUNCHED.match(name)}


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks for tests: `ranks.shared(world_size, function, *arguments)`, or `run` on new ones."""
    with closing(Ranks()) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def can_emulate() -> None:
    """Skips where no cluster can be emulated, as without root. Where one could, the next must."""
    try:
        with VirtualCluster(1, 1_000_000_000):
            pass
    except ClusterUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def cluster(can_emulate: None) -> Iterator[Callable[..., VirtualCluster]]:
    """Makes emulated clusters, with `VirtualCluster`'s arguments; they go when the test ends."""
    with ExitStack() as stack:

        def up(hosts: int, rate_bits_per_s: int, **options: Any) -> VirtualCluster:
            return stack.enter_context(VirtualCluster(hosts, rate_bits_per_s, **options))

        yield up
