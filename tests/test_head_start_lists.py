"""Which blocks a head start fills and keeps, where hashes end within a piece and groups are cached differently."""

from __future__ import annotations

import msgspec
import pytest

from asynckv.core.head_start import HeadStart
from asynckv.core.types import Reason, decode_params
from asynckv.core.wire import Offered, encode_offer
from asynckv.geometry.blocks import check_block_ids
from tests.test_follows import TICKET
from tests.test_head_start import Service, head
from tests.world import BLOCK, make_layout


@pytest.mark.parametrize(("end", "hashes"), [(1, ["end"]), (3, ["x", "end"])])
def test_tokens_of_a_piece_behind_its_last_whole_hash_are_not_trusted_where_the_loan_goes_on(
    end: int, hashes: list[str]
) -> None:
    """The ticket was used again for a prompt that differs there, and the reader gives no hashes."""
    service, it = Service(), head()
    it.took(service.params(end, 0, "x", recall=True, hashes=hashes, hash_tokens=2 * BLOCK), 1)
    loan = service.params(4, 0, "y", hashes=["x", "z"], hash_tokens=2 * BLOCK)
    ((first, _),) = it.rest(it.blocks, 4 * BLOCK, loan)
    assert first == (end - 1) * BLOCK


def test_a_piece_fills_nothing_of_a_group_that_is_cached_beyond_its_end() -> None:
    layout = make_layout()
    layout = msgspec.structs.replace(layout, groups=layout.groups * 2)
    it = HeadStart(layout, "e", check_block_ids(layout, [(0, [1, 2, 3, 4]), (2 * BLOCK, [5, 6])]), None)
    service = Service()
    service.params(1, 0, "p")
    assert service.ranks is not None
    groups = [(0, [7]), (0, [8])]
    lists = it.lists(decode_params(service.ranks.make_params("p", groups, BLOCK, written=True, recall=True)))
    assert lists is not None
    assert [ids.tolist() for _, ids in lists.local] == [[1], []]


def test_a_late_offer_is_not_released_while_the_request_has_a_head_start() -> None:
    """One rank's time was over just before its offer came, and another rank was offered the request in time."""
    service = Service(1, 2)
    world, (_, second) = service.world, service.decode
    service.early(1)
    world.run()
    late = service.follows[1]
    address, sender = late.rank.place
    second.core.decode.follows.end(late, Reason.NO_OFFER, "offered nothing in time", world.time(second))
    world.settle(second)
    params, _ = service.lend()
    offered = Offered(TICKET, late.nonces[-1], encode_offer(params))
    second.core.decode.receive(offered, address, sender, world.time(second))
    world.settle(second)
    world.run()
    service.pull(params)
    service.ended_well()
