"""Whose fault it is: every reason has a cause, and each remedy names a setting, a file or a party of its case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asynckv import told
from asynckv.core import wire
from asynckv.core.types import Reason
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE, FAILED_AS, HEADING, NEVER, WELL
from asynckv.tools.diagnose.leaks_values import Leak
from asynckv.tools.diagnose.records import Record
from tests.test_leaks import (
    BOTH,
    KEPT,
    NAMES,
    OTHER,
    RANK,
    RUNNING,
    D,
    E,
    P,
    away,
    begun,
    expired,
    failed,
    found,
    lent,
    met,
    pull_ended,
    retrying,
    say,
    stopped,
)

C = CAUSE
AT = "tcp://10.0.0.1:1"
RELEASED = expired(cause="released", owed=[], at=18.0, seconds=1.0)
STRANGERS = [begun(P), begun(D), stopped(P), stopped(D)]


def heading(leak: Leak) -> HEADING:
    return CATALOGUE[leak.cause].heading


def of_e(record: Record) -> Record:
    """The same of the second decode engine."""
    return replace(record, incarnation=OTHER, rank=RANK[OTHER], engine_id="other")


# -- reasons -----------------------------------------------------------------------------------------------------------


def test_every_reason_is_well_or_ends_no_pull_or_has_a_cause() -> None:
    ends = {*WELL, *NEVER, *FAILED_AS}
    assert ends == {str(x) for x in Reason}
    assert len(WELL) + len(NEVER) + len(FAILED_AS) == len(ends), "in one way each"
    assert all(WELL.values())
    # A claim, a hello or a pull itself may end with any of these; a reason that never ends one is none of them.
    assert not {str(x) for x in wire.REFUSED | wire.UNWELCOME} & NEVER.keys()


@pytest.mark.parametrize("reason", FAILED_AS)
def test_each_reason_has_a_cause_and_a_remedy(reason: str) -> None:
    [failure] = failed([*BOTH, pull_ended(15, reason, failed_in="read", detail="words")])
    assert failure.verdict.cause is not C.NOT_KNOWN
    assert failure.verdict.remedy
    assert "?" not in failure.sentence + failure.verdict.remedy + failure.verdict.sentence
    assert "{" not in failure.verdict.remedy


def test_reasons_of_one_refusal_have_remedies_of_their_own() -> None:
    alike = [x for x, reader in FAILED_AS.items() if reader.name in ("REFUSED", "REFUSED_HERE")]
    remedies = {failed([*BOTH, pull_ended(15, reason)])[0].verdict.remedy for reason in alike}
    assert len(remedies) == len(alike) == 11


@pytest.mark.parametrize("reason", WELL)
def test_what_is_well_is_no_failure(reason: str) -> None:
    assert failed([*BOTH, pull_ended(15, reason)]) == []


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("announced", C.ANNOUNCED_AND_FORGOTTEN),
        ("queue", C.TIMEOUT_TOO_SHORT),
        ("plan", C.TIMEOUT_TOO_SHORT),
        ("read", C.TIMEOUT_TOO_SHORT),
        ("confirm", C.TIMEOUT_TOO_SHORT),
        ("", C.NOT_KNOWN),
    ],
)
def test_a_deadline_is_judged_by_the_phase_that_it_ended(phase: str, cause: CAUSE) -> None:
    [failure] = failed([*BOTH, pull_ended(15, "timeout", failed_in=phase)])
    assert failure.verdict.cause is cause


def test_a_deadline_within_a_handshake_that_succeeds_is_short_and_one_in_vain_is_the_network() -> None:
    ended = pull_ended(15, "timeout", failed_in="handshake", failed_with=[RANK[P]])
    assert failed([*BOTH, ended])[0].verdict.cause is C.TIMEOUT_TOO_SHORT
    assert failed([*STRANGERS, ended])[0].verdict.cause is C.NEVER_SHOOK_HANDS


def test_a_reason_that_says_it_all_is_not_explained_by_a_pause() -> None:
    for reason, cause in (("wrong_request", C.OTHER_REQUEST_ID), ("queue_full", C.REFUSED_LOCALLY)):
        [failure] = failed([*BOTH, away(D, 14, 3), pull_ended(15, reason)])
        assert failure.verdict.cause is cause


# -- directions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["how", "event"])
@pytest.mark.parametrize(
    ("how", "cause", "remedy"),
    [
        ("turned_away", C.KEYS_REFUSED, f"Copy the .key file of {RANK[D]} into the directory"),
        (
            "unlisted_listener",
            C.LISTENER_UNLISTED,
            f"Copy the .key file of {RANK[P]} into the directory of authorized keys of {RANK[D]}.",
        ),
        ("no_key", C.KEYS_REFUSED, f"{RANK[D]} has keys and {RANK[P]} none"),
        ("needs_keys", C.KEYS_REFUSED, f"{RANK[P]} has keys and {RANK[D]} none"),
    ],
)  # fmt: skip
def test_the_remedy_says_whose_key_is_missing_where(by: str, how: str, cause: CAUSE, remedy: str) -> None:
    more = {"how": how} if by == "how" else {}
    ended = pull_ended(16, "peer_unreachable", failed_in="handshake", failed_with=[RANK[P]], **more)
    address = replace(begun(P), said={**begun(P).fields, "address": f"{AT}#ab"})
    records = [address, *STRANGERS[1:], ended]
    records += [say(15, told.Refused, D, cause=how, who=f"{AT}#ab")] if by == "event" else []
    [leak] = found([*records, expired(False)])
    assert (leak.cause, heading(leak), leak.remedy.startswith(remedy)) == (cause, HEADING.WRONG, True)
    if by == "how":
        [failure] = failed(records)
        assert (failure.verdict.cause, failure.verdict.remedy.startswith(remedy)) == (cause, True)


@pytest.mark.parametrize(
    ("reason", "noticed_s", "cause"),
    [
        ("peer_lost", 0.1, C.DATA_PLANE_DIED),
        ("peer_lost", 1.9, C.DATA_PLANE_DIED),
        ("read_failed", 0.5, C.CONNECTION_LOST),  # this transfer failed, and not because its process was gone
        ("peer_lost", 6.0, C.CONNECTION_LOST),
        ("timeout", 0.5, C.TIMEOUT_TOO_SHORT),
    ],
)
def test_a_reader_notices_a_dead_data_plane_before_its_owner(reason: str, noticed_s: float, cause: CAUSE) -> None:
    seconds = 1.5
    restarted = say(15 + noticed_s + seconds, told.DataPlaneRestarted, P, cause="SIGKILL", seconds=seconds)
    ended = pull_ended(15, reason, failed_in="read", seconds=0.02)
    [failure] = failed([*BOTH, ended, restarted])
    assert (failure.verdict.cause, failure.verdict.names["by"]) == (cause, RANK[P])
    # Whoever asks while no data plane serves fails for the same reason.
    later = pull_ended(15.3, reason, failed_in="handshake", failed_with=[RANK[P]], seconds=0.0, pull_id=f"{D[:16]}-2")
    if cause is C.DATA_PLANE_DIED:
        assert [len(x.pulls) for x in failed([*BOTH, ended, later, restarted])] == [2]


def test_keys_on_one_side_alone_are_seen_in_both_addresses() -> None:
    """Params that a router made name no key, so the listener just does not answer."""
    unmet = pull_ended(16, "peer_unreachable", failed_in="handshake", failed_with=[RANK[P]], how="no_answer")
    for keyed, remedy in ((P, f"{RANK[P]} has keys and {RANK[D]} none"), (D, f"{RANK[D]} has keys and {RANK[P]} none")):
        both = [replace(begun(x), said={**begun(x).fields, "address": AT + "#ab" * (x == keyed)}) for x in (P, D)]
        [leak] = found([*both, *STRANGERS[2:], expired(False), unmet])
        assert (heading(leak), leak.remedy.startswith(remedy)) == (HEADING.WRONG, True)


@pytest.mark.parametrize(
    ("first", "cause", "remedy"),
    [
        (("timeout", "announced"), C.ANNOUNCED_AND_FORGOTTEN, "`pull.announce_s`"),
        (("timeout", "read"), C.RELEASE_REFUSED, "`is_last=False`"),
        (("complete", ""), C.PARAMS_GIVEN_TWICE, "once"),
    ],
)
def test_what_the_reader_itself_has_released_is_not_another_readers(
    first: tuple[str, str], cause: CAUSE, remedy: str
) -> None:
    again = pull_ended(19, "consumed", failed_in="queue", seconds=0.1, pull_id=f"{D[:16]}-2")
    [failure] = [
        x
        for x in failed([*BOTH, pull_ended(15, first[0], failed_in=first[1]), again])
        if any(y.cause == "consumed" for y in x.pulls)
    ]
    assert (failure.verdict.cause, remedy in failure.verdict.remedy) == (cause, True)


def test_an_attempt_that_was_made_is_not_said_to_be_missing() -> None:
    """In the prefill rank's history the first attempt's release said that another would follow."""
    first = pull_ended(12, "read_failed")
    late = pull_ended(45, "expired", seconds=0.1, pull_id=f"{D[:16]}-2")
    [leak] = found(retrying([*BOTH, expired(), first, late]))
    assert leak.cause is C.LEASE_TOO_SHORT
    elsewhere = {"prefill_request_id": "b", "peer": "third", "sequence": 3, "pull_id": f"{D[:16]}-2"}
    [leak] = found(retrying([*BOTH, expired(), first, pull_ended(14, "complete", **elsewhere, seconds=0.5)]))
    assert leak.cause is C.RETRIED_ELSEWHERE
    assert "and then pulled b of third instead" in leak.sentence
    [leak] = found(retrying([*BOTH, expired(), first]))
    assert leak.cause is C.NO_ATTEMPT_FOLLOWED


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waited_s", "kept_s", "cause"),
    [
        (0.05, 0.02, C.TIMEOUT_TOO_SHORT),
        (0.05, 0.23, C.TIMEOUT_TOO_SHORT),
        (5.0, 4.0, C.TIMEOUT_TOO_SHORT),
        (2.0, 8.0, C.STUCK_TRANSFER),
        (0.05, 1.5, C.STUCK_TRANSFER),
    ],
)
def test_a_transfer_that_ends_soon_after_its_caller_gave_up_is_no_network(
    waited_s: float, kept_s: float, cause: CAUSE
) -> None:
    returned = say(15 + kept_s, told.BlocksReturned, D, **NAMES, seconds_after_failure=kept_s)
    [leak] = found([*BOTH, pull_ended(15, "timeout", **KEPT, seconds=waited_s), returned])
    assert leak.cause is cause
    assert (heading(leak) is HEADING.NETWORK) is (cause is C.STUCK_TRANSFER)
    if cause is C.TIMEOUT_TOO_SHORT:
        assert (
            f"after {waited_s:g} s, its caller's `timeout_s`, and the transfer ended only {kept_s:g} s" in leak.sentence
        )
        assert leak.remedy.startswith(f"Pass a longer `timeout_s` on {RANK[D]} than {waited_s:g} s,")
        # A client may leave at any time: its blocks came back with the transfer.
        leaks = found([*BOTH, pull_ended(15, "cancelled", **KEPT, seconds=waited_s), returned])
        assert ["its caller cancelled it" in x.sentence for x in leaks] == [True] * (kept_s > 1.0)
        assert all(f"If the client of {RANK[D]} left, nothing" in x.remedy for x in leaks)


def test_a_reader_without_file_descriptors_is_no_network() -> None:
    ended = pull_ended(15, "peer_unreachable", failed_in="handshake", failed_with=[RANK[P]], how="no_files")
    [failure], [leak] = failed([*STRANGERS, ended]), found([*STRANGERS, ended, expired(False)])
    assert failure.verdict.remedy == leak.remedy
    assert leak.remedy.startswith(f"{RANK[D]} has no file descriptors left")


@pytest.mark.parametrize("cause", ["cancelled", "revoked", "withdrawn"])
def test_a_transfer_that_ends_a_moment_after_a_good_end_is_no_finding(cause: str) -> None:
    for kept_s in (0.2, 3.0):
        returned = say(15 + kept_s, told.BlocksReturned, D, **NAMES, seconds_after_failure=kept_s)
        assert bool(found([*BOTH, pull_ended(15, cause, **KEPT), returned])) is (kept_s > 1.0)


@pytest.mark.parametrize(("at", "cause"), [(17.0, C.PREFILL_CLOSED), (100.0, C.READER_CLOSED)])
def test_a_prefill_rank_that_closed_during_a_pull_is_the_one_to_drain(at: float, cause: CAUSE) -> None:
    """Also if the reader was closed long after."""
    [failure] = failed([*RUNNING, pull_ended(15, "engine_closed"), stopped(P, at), stopped(D, 300.0)])
    assert failure.verdict.cause is cause


def test_a_forgotten_announcement_names_its_limit() -> None:
    [leak] = found([*BOTH, pull_ended(60, "timeout", failed_in="announced", seconds=50.0)])
    assert leak.cause is C.ANNOUNCED_AND_FORGOTTEN
    assert leak.remedy.startswith(f"The scheduler of {RANK[D]} has to pull what it announced")
    assert "`pull.announce_s`" in leak.remedy


@pytest.mark.parametrize(
    ("more", "cause", "why"),
    [
        ([], C.PREFILL_LENDS_NOTHING, "that lent nothing meanwhile"),
        ([lent(12.0, request_id="b", sequence=5)], C.NOT_LENT_IN_TIME, "it was not lent, and 1 others were meanwhile"),
        ([lent(17.0), RELEASED], C.NOT_LENT_IN_TIME, "it was lent 2 s after"),
        ([away(P, 15, 4.0)], C.PREFILL_LOOP_AWAY, "was away for 4 s"),
    ],
)  # fmt: skip
def test_what_was_not_lent_in_time_is_the_prefill_side(more: list[Record], cause: CAUSE, why: str) -> None:
    ended = pull_ended(15, "not_lent_yet", failed_in="queue", detail="not lent yet by ...")
    [failure] = failed([*BOTH, ended, *more])
    assert failure.verdict.cause is cause
    assert why in failure.verdict.sentence
    assert RANK[P] in failure.verdict.sentence
    assert cause is C.PREFILL_LOOP_AWAY or f"scheduler of {RANK[P]}" in failure.verdict.remedy


# -- parties -----------------------------------------------------------------------------------------------------------


def test_params_that_two_engines_were_given_are_one_finding() -> None:
    """`wrong_cohort` is what `consumed` is some milliseconds later."""
    ours = pull_ended(15, "wrong_cohort", failed_in="confirm")
    theirs = of_e(pull_ended(15.01, "complete", pull_id="eeeeeeee33333333-1"))
    late = {"prefill_request_id": "b", "sequence": 1, "pull_id": f"{D[:16]}-2"}
    second = pull_ended(16, "consumed", **late)
    [failure] = failed([*BOTH, of_e(begun(D)), ours, theirs, second])
    assert (failure.verdict.cause, len(failure.pulls)) == (C.PARAMS_GIVEN_TWICE, 2)
    assert CATALOGUE[failure.verdict.cause].heading is HEADING.WRONG
    # Without another engine it may be one of another size.
    [failure] = failed([*BOTH, ours])
    assert (failure.verdict.cause, "`tp_size`" in failure.verdict.remedy) == (C.RELEASE_REFUSED, True)


def test_the_only_decode_engine_was_closed_in_order_and_the_router_is_not_blamed() -> None:
    """The lends come just before the last line of its log, while it closes."""
    for closed_at in (9.0, 10.1, 10.9):
        [leak] = found([begun(P), begun(D), *met(), stopped(D, closed_at), stopped(P), expired(False)])
        assert (leak.cause, heading(leak), leak.reader) == (C.NO_READER_RUNS, HEADING.GONE, RANK[D])
        assert f"{RANK[D]} closed at 01:46:" in leak.sentence
        assert leak.sentence.endswith(", and no decode engine ran since")
    # It lived for a while: it would have heard of it.
    [leak] = found([begun(P), begun(D), *met(), stopped(D, 25.0), stopped(P), expired(False)])
    assert leak.cause is C.NEVER_HEARD_OF
    # Another engine lives; or it starts long after the lend.
    for started_at, cause in ((0.0, C.NEVER_HEARD_OF), (20.0, C.NO_READER_RUNS)):
        asked = of_e(pull_ended(started_at + 7, "complete", prefill_request_id="w", sequence=7, seconds=0.1))
        lives = [of_e(begun(D, started_at)), of_e(stopped(D)), asked]
        [leak] = found([begun(P), begun(D), *met(), stopped(D, 9.0), stopped(P), *lives, expired(False)])
        assert (leak.cause, f"{RANK[OTHER]} started at 01:47:00" in leak.sentence) == (cause, started_at > 0)
    # It was killed, and its next start came after the lease.
    again = replace(begun(E, 60.0), rank="decode/tp0@cccccccc", engine_id="decode")
    [leak] = found([begun(P), begun(D), *met(), again, stopped(E), stopped(P), expired(False)])
    assert heading(leak) is HEADING.GONE


def test_each_remedy_names_the_parties_of_its_case() -> None:
    unmet = pull_ended(16, "peer_unreachable", failed_in="handshake", failed_with=[RANK[P]])
    [leak] = found([*STRANGERS, expired(False), unmet])
    assert leak.remedy.endswith(f"`asynckv doctor --to {AT}` on the host of {RANK[D]}.")
    [failure] = failed([*RUNNING, pull_ended(15, "not_owed")])
    assert (
        failure.verdict.remedy
        == f"Correct `tp_rank` and `tp_size` of {RANK[D]}: by these, other ranks of its engine answer for {RANK[P]}."
    )


def test_who_said_goodbye_before_a_pull_began_is_no_network() -> None:
    [found] = failed([*BOTH, pull_ended(15, "peer_lost", how="goodbye", detail="words", failed_with=[RANK[P]])])
    assert found.verdict.cause is CAUSE.PREFILL_CLOSED
