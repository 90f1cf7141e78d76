"""Two engines: what the prefill engine stored is what the decode engine reads, and nothing is left behind."""

from __future__ import annotations

from tests.vllm.engines import Server
from tests.vllm.models import Attention, Model
from tests.vllm.pairs import Pair
from tests.vllm.setups import Connector, Setup

DENSE = Model(layers=(Attention(),) * 4, block_size=32)


def test_a_request_is_prefilled_in_one_engine_and_decoded_in_the_other(server: Server, connector: Connector) -> None:
    pair = Pair.start(server, Setup("prefill", DENSE, connector))
    pair.generate(pair.prompt(100))
    pair.settle()
