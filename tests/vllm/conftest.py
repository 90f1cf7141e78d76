"""Two engines per test, forked from a server that has imported vLLM once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.engines import Server
from tests.vllm.setups import Connector
from tests.vllm.versions import HAS_OFFLOAD

collect_ignore_glob = [] if HAS_OFFLOAD else ["test_offload*.py"]  # `test_compat` shows that it is refused there

OURS = Connector()
THEIRS = Connector("NixlConnector", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--connector",
        choices=("ours", "theirs", "inside"),
        default="ours",
        help="what moves the cache: asynckv's connector, vLLM's own NixlConnector, or ours in vLLM's MultiConnector",
    )
    parser.addoption("--seeds", default="6", help="random runs: how many, or FIRST..LAST")


@pytest.fixture(scope="session")
def connector(request: pytest.FixtureRequest) -> Connector:
    """The connector under test."""
    known = {"ours": OURS, "theirs": THEIRS, "inside": Connector(is_inside=True)}
    return known[request.config.getoption("--connector")]


@pytest.fixture
def server() -> Iterator[Server]:
    """Starts engines, which end with the test."""
    server = Server()
    yield server
    server.close()
