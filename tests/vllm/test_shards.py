"""Context parallelism: engines whose ranks share the tokens of blocks. Every byte is judged by vLLM's slot mapping."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm

from asynckv.geometry.match import assign
from asynckv.geometry.plan import plan_read
from asynckv.geometry.tables import PeerTables
from tests import oracle
from tests.vllm.engines import Server
from tests.vllm.models import Attention, Mamba, Model
from tests.vllm.pairs import Pair
from tests.vllm.setups import Connector, Setup
from tests.vllm.test_departures import unlent
from tests.world import Buffers, block_lists, make_layout

BLOCK = 32
LATENT = Attention(heads=1, size=64, is_mla=True)
MODELS = {
    "mla": Model(layers=(LATENT,) * 2, block_size=BLOCK),
    "gqa": Model(layers=(Attention(heads=1),) * 2, block_size=BLOCK),
    "gqa-2": Model(layers=(Attention(heads=2),) * 2, block_size=BLOCK),
    "kernel-blocks": Model(layers=(replace(LATENT, kernel_block=16),) * 2, block_size=BLOCK),
    "whole": Model(layers=(LATENT, replace(LATENT, is_whole=True)), block_size=BLOCK),
    "mamba2-align": Model(layers=(Mamba(), Mamba(), LATENT, Mamba()), block_size=BLOCK),
    "gdn-none": Model(layers=(Mamba(kind="gdn"), LATENT, Mamba(kind="gdn")), block_size=BLOCK, mamba_mode="none"),
}
LENGTHS = (2, 31, 33, 64, 65, 127, 128, 129, 200, 300)


def setup_of(name: str, connector: Connector, dcp: int, interleave: int, **fields: object) -> Setup:
    """Describe an engine of `dcp` ranks that share tokens; longer prompts are prefilled in chunks."""
    one = Setup("prefill", MODELS[name], connector, dcp=dcp, tp=dcp, interleave=interleave)
    has_prefixes = name != "gdn-none"
    return replace(one, max_num_batched_tokens=192, prefix_caching=has_prefixes, **fields)  # type: ignore[arg-type]


def check(pair: Pair) -> None:
    """Prompts of all lengths arrive whole, also behind prefixes of all lengths, and nothing is left."""
    pair.generate(*(pair.prompt(count) for count in LENGTHS), most=40)
    base = pair.prompt(300)
    for cut in (0, 1, 32, 63, 64, 100, 127, 128, 129, 256, 300):
        # The decode engine has seen the cut's tokens; the prefill engine sees some of them for the second time.
        pair.generate(base[:cut] + pair.prompt(20 + cut), most=3)
    pair.settle()
    assert pair.decode.ask("counted")["computed_locally"] == {}
    assert pair.prefill.ask("met")["chunks"]
    assert pair.decode.ask("met")["cached"] > (len(LENGTHS) if pair.decode.setup.prefix_caching else 0)
    assert all(rank["counters"]["bytes.read"] for rank in pair.decode.ask("look"))


@pytest.mark.parametrize("interleave", [1, BLOCK])
@pytest.mark.parametrize(("prefill", "decode"), [(p, d) for p in (1, 2, 4) for d in (1, 2, 4) if p * d > 1])
@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_every_byte_arrives_between_any_shares_of_tokens(
    server: Server, connector: Connector, name: str, prefill: int, decode: int, interleave: int
) -> None:
    one, other = (setup_of(name, connector, dcp, interleave) for dcp in (prefill, decode))
    check(Pair.start(server, one, other))


@pytest.mark.parametrize(("prefill", "decode"), [((2, 4), (4, BLOCK)), ((4, BLOCK), (2, 1)), ((4, 1), (4, 8))], ids=str)
def test_every_byte_arrives_between_other_interleaves(
    server: Server, connector: Connector, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    check(Pair.start(server, setup_of("mla", connector, *prefill), setup_of("mla", connector, *decode)))


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [("gqa-2", (4, 2), (2, 1)), ("gqa-2", (4, 2), (1, 1)), ("mla", (4, 2), (2, 2)), ("mla", (4, 2), (4, 4))],
    ids=str,
)
def test_ranks_may_hold_replicas_of_shares(
    server: Server, connector: Connector, name: str, prefill: tuple[int, int], decode: tuple[int, int], is_turned: bool
) -> None:
    engines = [setup_of(name, connector, dcp, 1, tp=tp) for tp, dcp in (prefill, decode)]
    check(Pair.start(server, *(reversed(engines) if is_turned else engines)))


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("name", ["kernel-blocks", "whole"])
def test_kernel_blocks_and_layers_that_are_whole_arrive(
    server: Server, connector: Connector, name: str, prefill: int, decode: int
) -> None:
    check(Pair.start(server, setup_of(name, connector, prefill, 16), setup_of(name, connector, decode, 1)))


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["mamba2-align", "gdn-none"])
def test_latents_and_states_arrive(server: Server, connector: Connector, name: str, prefill: int, decode: int) -> None:
    check(Pair.start(server, setup_of(name, connector, prefill, 1), setup_of(name, connector, decode, BLOCK)))


@pytest.mark.parametrize(("pcp", "dcp"), [(2, 1), (2, 2), (4, 4)])
@pytest.mark.parametrize("decode", [1, 2])
def test_an_engine_that_shares_prefills_is_read(
    server: Server, connector: Connector, pcp: int, dcp: int, decode: int
) -> None:
    one = setup_of("mla", connector, dcp, 1, tp=1, pcp=pcp, role="kv_producer")
    check(Pair.start(server, one, setup_of("mla", connector, decode, BLOCK)))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(("prefill", "decode"), [(4, 2), (1, 2)])
def test_clients_that_leave_leave_nothing_behind(
    server: Server, connector: Connector, prefill: int, decode: int, steps: int
) -> None:
    pair = Pair.start(server, setup_of("mla", connector, prefill, 1), setup_of("mla", connector, decode, BLOCK))
    params = unlent(pair, tokens := pair.prompt(300))
    pair.decode.ask("hold")
    pair.ask(tokens, params)
    pair.decode.ask("step", steps)
    pair.decode.ask("abort_in_step", [f"d-{pair.count}"])
    pair.decode.ask("go")
    pair.prefill.ask("go")
    pair.settle()
    pair.generate(pair.prompt(200))
    pair.settle()


THEIR_TEST = "test_apply_dcp_prefix_caching_matches_global_logical_positions"
THEIR_FILE = Path(vllm.__file__).parents[1] / "tests/v1/kv_connector/unit/test_nixl_connector_hma.py"


def their_cases() -> list[Any]:
    """Read the cases of vLLM's own test of its prefix caching with DCP from its source."""
    tree = ast.parse(THEIR_FILE.read_text())
    (test,) = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == THEIR_TEST]
    (given,) = [each for each in test.decorator_list if isinstance(each, ast.Call)]
    names, cases = given.args
    keys = ast.literal_eval(names).split(",")
    values = [map(ast.literal_eval, each.args) for each in ast.walk(cases) if isinstance(each, ast.Call)]
    found = [dict(zip(keys, each, strict=True)) for each in values]
    assert len(found) >= 4
    return found


@pytest.mark.parametrize("case", their_cases(), ids=str)
def test_the_blocks_of_vllms_own_cases_are_read(case: dict[str, Any]) -> None:
    """A page of theirs is a block on one rank, because `NixlConnector` has interleaves of a block."""
    size, other = case["local_dcp_size"], case["remote_dcp_size"]
    cached = case["local_num_computed_blocks"]
    pages = min((cached + len(case["local_ids"])) * size, len(case["remote_ids"]) * other)

    def ranks(size: int, base: int) -> list[Buffers]:
        fields: dict[str, Any] = {"shards": size, "interleave": 4, "num_heads": 1, "num_blocks": 256, "base": base}
        return [Buffers(make_layout(rank, size, block_size=4 * size, **fields), 0) for rank in range(size)]

    here, remotes = ranks(size, 1 << 40)[case["local_dcp_rank"]], ranks(other, 1 << 41)
    shares = assign(here.layout, [each.layout for each in remotes])
    remote = remotes[case["remote_rank"]]
    for array in here.arrays:
        array[:] = 0
    for block in range(256):
        remote.overwrite(block, block)
    offered = oracle.offers([(0, case["remote_ids"])])
    lists = block_lists(here.layout, [(4 * size * cached, case["local_ids"])], offered, 4 * pages)
    tables = PeerTables(here.layout, remote.layout, shares[case["remote_rank"]], itertools.count(1))
    written = [np.zeros(len(a), np.bool_) for a in here.arrays]
    oracle.execute(plan_read(tables, lists), here, remote, written, (1 << 20, 512))
    read = {block: set(here.block(block)) for block in range(256)}
    expected = dict(zip(case["expected_local"], case["expected_remote"], strict=True))
    assert read == {block: {expected.get(block, 0)} for block in range(256)}
