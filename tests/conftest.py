"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture
def anyio_backend() -> str:
    """asyncio only: the control plane's sockets are driven by its loop."""
    return "asyncio"


@pytest.fixture(autouse=True)
def unconfigured_logging() -> Iterator[None]:
    """Leave structlog as it was found: the command line configures it for its own process."""
    yield
    structlog.reset_defaults()
