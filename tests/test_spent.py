"""Which keys are spent: a set that forgets nothing but open keys, in bounded memory."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from asynckv.core.spent import MAX_EPOCHS, SpentKeys
from asynckv.core.types import Key


def key(sequence: int, epoch: str = "e") -> Key:
    return Key(epoch, 0, sequence, "0" * 32)


def size(spent: SpentKeys) -> int:
    """Numbers that are kept."""
    return sum(len(firsts) + len(lasts) for firsts, lasts in spent._runs.values())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40))))
def test_it_is_the_set_of_what_was_added(added: list[tuple[str, int]]) -> None:
    spent, model = SpentKeys(), set()
    for epoch, sequence in added:
        assert spent.add(key(sequence, epoch)) is ((epoch, sequence) not in model)
        model.add((epoch, sequence))
        assert {(e, s) for e in "abc" for s in range(42) if key(s, e) in spent} == model
    assert spent.num_given_up == 0
    gaps = sum((e, s) not in model and (e, s + 1) in model for e in "abc" for s in range(41))
    assert spent.num_gaps == gaps


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60)), max_size=60), st.integers(0, 4))
def test_what_was_added_stays_whatever_has_to_be_given_up(added: list[tuple[str, int]], most: int) -> None:
    spent, model = SpentKeys(most), set()
    for epoch, sequence in added:
        was_open, given_up = sum(key(s, e) not in spent for e in "ab" for s in range(61)), spent.num_given_up
        is_new = key(sequence, epoch) not in spent
        spent.add(key(sequence, epoch))
        model.add((epoch, sequence))
        assert all(key(s, e) in spent for e, s in model)
        # What is given up is said, and nothing above the newest is.
        given_up = spent.num_given_up - given_up
        assert was_open - sum(key(s, e) not in spent for e in "ab" for s in range(61)) == given_up + is_new
        assert all(key(1 + max(s for d, s in model if d == e), e) not in spent for e, _ in model)
        assert spent.num_gaps <= most


def test_the_oldest_gap_is_given_up_first() -> None:
    spent = SpentKeys(2)
    for sequence in (1, 3, 6):
        spent.add(key(sequence))
    assert [s for s in range(8) if key(s) not in spent] == [2, 4, 5, 7]


def test_any_number_of_requests_is_open_in_one_gap() -> None:
    spent = SpentKeys()
    spent.add(key(1 << 50))
    for sequence in range(200_000, 0, -1):
        spent.add(key(sequence))
    assert spent.num_gaps == 2
    assert key(0) not in spent
    assert key(200_001) not in spent


def test_a_hundred_thousand_requests_in_random_order_are_all_taken() -> None:
    spent, order = SpentKeys(), list(range(100_000))
    random.Random(0).shuffle(order)
    for sequence in order:
        spent.add(key(sequence))
    assert (size(spent), spent.num_given_up) == (2, 0)


def test_memory_is_bounded_when_one_request_in_two_is_never_lent() -> None:
    spent = SpentKeys(1000)
    for sequence in range(1, 10_000, 2):
        spent.add(key(sequence))
    assert 980 <= spent.num_gaps <= 1000
    assert spent.num_given_up == 5000 - spent.num_gaps
    assert size(spent) == 2 * spent.num_gaps + 2


def test_who_leaves_gaps_without_end_takes_none_from_others() -> None:
    spent = SpentKeys(100)
    for sequence in (1, 3, 5):
        spent.add(key(sequence, "careful"))
    for sequence in range(1, 10_000, 2):
        spent.add(key(sequence, "careless"))
    spent.add(key(7, "careful"))
    assert [s for s in range(9) if key(s, "careful") not in spent] == [0, 2, 4, 6, 8]


def test_schedulers_are_bounded_and_the_one_that_lends_is_not_forgotten() -> None:
    spent = SpentKeys()
    for epoch in range(2 * MAX_EPOCHS):
        spent.add(key(5, str(epoch)))
        spent.add(key(2 * epoch, "busy"))
    assert len(spent._runs) == MAX_EPOCHS
    assert spent.num_forgotten == MAX_EPOCHS + 1
    assert all(key(2 * epoch, "busy") in spent for epoch in range(2 * MAX_EPOCHS))
    assert spent.num_gaps == sum(len(firsts) - 1 for firsts, _ in spent._runs.values())


def test_of_many_schedulers_with_a_gap_each_as_many_gaps_are_closed_as_there_is_no_room_for() -> None:
    spent = SpentKeys(max_gaps=256)  # so many that several are closed at once, where one scheduler has them
    for number in range(300):
        spent.add(key(1, f"e{number}"))
    assert (spent.num_gaps, spent.num_given_up) == (256, 44)
    assert sum(key(0, f"e{number}") in spent for number in range(300)) == 44
