"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.engines import Bench


@pytest.fixture
def anyio_backend() -> str:
    """asyncio only: the control plane's sockets are driven by its loop."""
    return "asyncio"


@pytest.fixture(autouse=True)
def unconfigured_logging() -> Iterator[None]:
    """Leave structlog as it was found: the command line configures it for its own process."""
    yield
    structlog.reset_defaults()


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.nixl)])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param == "real")


@pytest.fixture
def sim() -> Bench:
    return Bench(False)
