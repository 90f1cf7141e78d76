"""What the catalogue decides, by example: `tests/test_offload_machine.py` has the properties."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.core.events import Ending
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.job import JobEnded, JobOutcome, MoveKind
from asynckv.offload.keys import StoredGroup

FULL = StoredGroup(name="full", block_size=16, record_bytes=4096)


def prompt(n: int, name: str = "p") -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(n)]


def carry_out(catalogue: Catalogue, ending: Ending = Ending.DONE, kinds: Sequence[MoveKind] = tuple(MoveKind)) -> int:
    """Carry out whatever moves come; returns how many."""
    count = 0
    while moves := catalogue.moves(0.0):
        for move in moves:
            catalogue.ended(move.move_id, ending if move.kind in kinds else Ending.DONE)
            count += 1
        assert catalogue.check_integrity() == []
    return count


def endings(catalogue: Catalogue) -> dict[str, JobOutcome]:
    return {told.job_id: told.outcome for told in catalogue.news() if isinstance(told, JobEnded)}


def test_what_is_stored_is_found_and_loaded() -> None:
    catalogue = Catalogue([FULL], 16, 1 << 20)
    catalogue.store("a", prompt(10))
    assert catalogue.lookup(prompt(10)).would_wait
    carry_out(catalogue)
    found = catalogue.lookup([*prompt(10), b"more"])
    assert (found.tokens, found.ready_tokens, found.would_wait) == (160, 160, False)
    catalogue.load("b", prompt(10), found.tokens)
    carry_out(catalogue)
    assert endings(catalogue) == {"a": JobOutcome.DONE, "b": JobOutcome.DONE}
