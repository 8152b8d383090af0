"""Every op is tested in poisoned memory."""

import pytest


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory):
    pass
