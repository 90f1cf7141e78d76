"""Holders of blocks, with groups that see the same pages."""

from __future__ import annotations

import pytest

from asynckv.core.ledger import Ledger
from asynckv.errors import LocalProtocolError


def test_a_page_is_one_block_whatever_group_names_it() -> None:
    ledger = Ledger([10, 8, 10], (0, 1, 0))
    ledger.take("lease", "lent", "r1", {0: [5], 1: [3]}, 0.0)
    with pytest.raises(LocalProtocolError, match="block 5 of group 2 cannot be filled: it is lent to \\('r1'\\)"):
        ledger.take("pull", "writing", "r2", {2: [5]}, 0.0)
    ledger.take("other", "lent", "r3", {2: [5]}, 0.0)
    ledger.take("pull", "writing", "r2", {1: [5], 2: [6]}, 0.0)
    assert (ledger.num_held("lent"), ledger.num_held("writing")) == (2, 2)
    assert ledger.audit() == []
    with pytest.raises(LocalProtocolError, match="block 7 is named in two groups that share its page"):
        ledger.take("two", "writing", "r4", {0: [7], 2: [7]}, 0.0)
    for holder in ("lease", "other", "pull"):
        ledger.drop(holder)
    assert (ledger.num_held("lent"), ledger.num_held("writing"), len(ledger)) == (0, 0, 0)
    ledger.take("pull", "writing", "r2", {2: [5, -1]}, 0.0)
    assert ledger.audit() == []
