"""Each planted fault's text stands in its file once, and the tests of its area are there."""

import pytest

from benchmarks.planted_faults import ROOT, Fault, faults


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text("utf-8").count(fault.old) == 1
    assert all((ROOT / path).exists() for path in fault.tests)
