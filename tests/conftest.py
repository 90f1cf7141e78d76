"""What all tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """asyncio only: the control plane's sockets are driven by its loop."""
    return "asyncio"
