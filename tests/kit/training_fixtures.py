"""Names of pytest's fixtures that leave a test's own on its line."""

import pytest

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
