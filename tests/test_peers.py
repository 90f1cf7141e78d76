"""One remote rank as a reader knows it: how often it is asked, when it is left in peace, whose answers count.

What a rank is said to be and what it says itself come from outside, so nothing here is taken on trust: an answer counts
for the start of a process that was asked, and from the start that it was asked of.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest

from asynckv.config import EngineConfig, PullConfig
from asynckv.core import peers
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.flow import InFlight, PeerLine
from asynckv.core.outbox import PeerReached
from asynckv.core.peer import Peer, PeerState
from asynckv.core.peers import MAX_UNMET
from asynckv.core.pull import Pull, PullRequest, PullState
from asynckv.core.routes import MAX_SOURCES
from asynckv.core.types import Address, Endpoint, How, KVTransferParams, Outcome, Reason, ReplyTo
from asynckv.core.wire import (
    Ack,
    Claim,
    Goodbye,
    Granted,
    Hello,
    Message,
    NotYet,
    Ping,
    Pong,
    Refused,
    Release,
    Renew,
    StatusRequest,
    Unwelcome,
    decode_packet,
    encode_packet,
)
from asynckv.errors import ConfigError, LocalProtocolError, PlanRefused
from asynckv.scheduler import PrefillRanks
from asynckv.testing import SimControl
from asynckv.testing.fabric import Port
from asynckv.told import ReleaseUnanswered
from tests.engines import Bench, turn_loop
from tests.test_admission import ask, asking, state, world_of
from tests.world import Rank, World, begin, make_layout, opened, reason


def said(world: World, rank: Rank) -> list[Message]:
    mine = [letter for letter in world.letters if letter.sender is rank]
    world.letters = [letter for letter in world.letters if letter.sender is not rank]
    return [message for letter in mine for message in decode_packet(letter.data).messages]


def say(world: World, speaker: Rank, hearer: Rank, message: Message, sender: str = "", target: str = "") -> None:
    """Let a rank say something over the link to it, as another start of its process or to one if need be."""
    sender = sender or speaker.core.identity.incarnation
    packet = encode_packet(sender, target or hearer.core.identity.incarnation, [message])
    hearer.core.receive(speaker.address, packet, world.time(hearer))
    world.settle(hearer)


def quiet(world: World, decode: Rank, seconds: float) -> list[Message]:
    """Let time pass in which nobody hears anything; return what the reader said."""
    out = []
    end = world.now + seconds
    while world.now < end - 1e-9:
        world.advance(min(0.05, end - world.now))
        out += said(world, decode)
        world.letters.clear()
    return out


# -- the pause after a handshake that failed ------------------------------------------------------------

SLOW_TO_ANGER: dict[str, Any] = {"handshake_s": 1.0, "hello_retry_s": 4.0, "backoff_s": 0.5, "max_backoff_s": 4.0}
numbers = itertools.count()


def pauses(world: World, prefill: Rank, decode: Rank, count: int) -> list[float]:
    """Ask for something ten times a second from a rank that does not answer; return the pauses between handshakes."""
    begun = list[float]()
    nonces = set[int]()
    while len(begun) <= count:
        ask(world, prefill, decode, next(numbers) % 512)
        for message in said(world, decode):
            if isinstance(message, Hello) and message.nonce not in nonces:
                nonces.add(message.nonce)
                begun.append(world.now)
        world.advance(0.1)
    return [b - a - 1.0 for a, b in itertools.pairwise(begun)]


def test_the_pause_before_a_rank_is_asked_again_doubles_up_to_a_bound() -> None:
    """However many want to read from it: a rank that is down is not hammered, and one that is back is found."""
    world, (prefill,), decode = world_of(**SLOW_TO_ANGER)
    assert pauses(world, prefill, decode, 5) == pytest.approx([0.5, 1.0, 2.0, 4.0, 4.0], abs=0.11)


def test_a_rank_that_was_met_is_asked_again_soon() -> None:
    """What went wrong before it was met is forgiven: the pauses begin anew."""
    world, (prefill,), decode = world_of(**SLOW_TO_ANGER)
    assert pauses(world, prefill, decode, 3) == pytest.approx([0.5, 1.0, 2.0], abs=0.11)
    world.letters.clear()
    world.advance(5.0)
    pull = ask(world, prefill, decode, 500)
    world.run()
    assert pull.reason is Reason.COMPLETE
    decode.core.decode.forget(prefill.address, world.time(decode))
    assert pauses(world, prefill, decode, 2) == pytest.approx([0.5, 1.0], abs=0.11)


def test_each_start_of_a_process_has_a_pause_of_its_own() -> None:
    """A process that was started anew is met at once, whatever its predecessor's sins; so is any other rank."""
    world, (prefill, other), decode = world_of(2, **SLOW_TO_ANGER)
    pauses(world, prefill, decode, 4)
    again = msgspec.structs.replace(prefill.endpoint, incarnation="another start")
    params = world.params([prefill], "r", [511], 4, written=True)
    params = msgspec.structs.replace(params, endpoints=(again,))
    said(world, decode)
    world.pull(decode, "again", [511], params)
    ask(world, other, decode, 510)
    assert [type(message) for message in said(world, decode)] == [Hello, Hello]


def test_a_rank_may_be_down_for_a_year() -> None:
    config = PullConfig()
    it = Peer("prefill", 0, 0, Address("tcp://127.0.0.1:1"), "start", PeerLine(InFlight()))
    for number in range(5000):
        it.greet(number, config, 1e7)
        it.failed(Reason.UNREACHABLE, "no answer", config, 1e7)
    assert it.not_before == 1e7 + config.max_backoff_s


def test_a_hello_that_is_not_answered_is_repeated_ever_more_seldom() -> None:
    """The same question each time: the answer to any of them is the answer."""
    world, (prefill,), decode = world_of(handshake_s=5.0, hello_retry_s=0.25)
    ask(world, prefill, decode, 0)
    heard = [(0.0, message) for message in said(world, decode)]
    while world.now < 4.9:
        world.advance(0.05)
        heard += [(world.now, message) for message in said(world, decode)]
    hellos = [(at, message.nonce) for at, message in heard if isinstance(message, Hello)]
    assert [round(b - a, 1) for (a, _), (b, _) in itertools.pairwise(hellos)] == [0.2, 0.5, 1.0, 2.0]
    assert len({nonce for _, nonce in hellos}) == 1


# -- silence ----------------------------------------------------------------------------------------------


def silent(**config: Any) -> tuple[World, Rank, Rank, Pull]:
    """A rank has fallen silent while one read of many runs."""
    world, (prefill,), decode = world_of(max_post_bytes=64, window_bytes=64, total_bytes=128, **config)
    params, _ = world.lent(prefill, "big", list(range(300, 304)), written=True)
    pull = world.pull(decode, "big", list(range(300, 304)), params)
    world.deliver_all()
    assert len(decode.reads) == 1
    quiet(world, decode, 1.5)
    return world, prefill, decode, pull


def test_nothing_is_posted_to_a_rank_that_has_fallen_silent_until_it_is_heard_of() -> None:
    """What runs there may end; who has bytes to come waits, and goes on where it stood when the rank speaks again."""
    world, prefill, decode, pull = silent()
    (running,) = decode.reads
    world.complete(decode, running)
    assert decode.reads == {}
    later = ask(world, prefill, decode, 1)
    assert decode.reads == {}
    assert later.state is PullState.QUEUED
    say(world, prefill, decode, Pong(0))
    assert len(decode.reads) == 1
    world.run()
    assert [p.request_id for p in decode.ended] == ["big", "d1"]
    assert (pull.reason, later.reason) == (Reason.COMPLETE, Reason.COMPLETE)


def test_a_pull_that_was_reading_goes_on_as_soon_as_the_rank_is_heard_of() -> None:
    """Though nothing else happens, and nobody else asks for anything."""
    world, prefill, decode, pull = silent()
    (running,) = decode.reads
    world.complete(decode, running)
    say(world, prefill, decode, Pong(0))
    assert len(decode.reads) == 1
    assert pull.state is PullState.READING


def test_no_pull_is_admitted_to_read_from_a_rank_that_has_fallen_silent() -> None:
    """A place among those who read would be taken from others for nothing."""
    world, prefill, decode, pull = silent(total_requests=1, window_requests=1)
    queued = ask(world, prefill, decode, 1)
    world.cancel(decode, pull)
    world.complete_all()
    assert pull.reason is Reason.CANCELLED
    assert (queued.state, decode.reads) == (PullState.QUEUED, {})
    say(world, prefill, decode, Pong(0))
    assert queued.state is PullState.READING


def test_a_rank_that_stays_silent_is_given_up_with_all_pulls_that_wait_for_it() -> None:
    """Met again, it serves whoever comes then."""
    world, prefill, decode, pull = silent(gone_s=3.0, total_requests=1, window_requests=1)
    queued = ask(world, prefill, decode, 1)
    quiet(world, decode, 2.0)
    assert queued.reason is Reason.PEER_LOST
    assert "silent for 3." in queued.detail
    (running,) = decode.reads
    world.complete(decode, running)
    assert pull.reason is Reason.PEER_LOST
    assert decode.reads == {}
    world.advance(1.0)
    after = ask(world, prefill, decode, 2)
    world.run()
    assert after.reason is Reason.COMPLETE


@pytest.mark.parametrize("how", ["says goodbye", "is forgotten"])
def test_no_pull_is_left_in_the_queue_of_a_rank_that_is_lost(how: str) -> None:
    """Whoever stood there has failed, and is not kept for as long as the rank is remembered."""
    world, prefill, decode, pull = silent()
    (peer,) = decode.core.decode.peers.by_place.values()
    assert len(peer.line.posters) == 1
    if how == "says goodbye":
        say(world, prefill, decode, Goodbye())
    else:
        decode.core.decode.forget(prefill.address, world.time(decode))
    assert [*peer.line.posters] == []
    assert pull.state in (PullState.DRAINING, PullState.NOTIFYING)


def test_a_connection_is_kept_while_it_is_used_and_closed_when_it_was_not_for_long() -> None:
    world, (prefill,), decode = world_of(idle_s=10.0)
    hellos = []
    for number, pause_s in enumerate((6.0, 6.0, 6.0, 12.0, 0.0)):
        ask(world, prefill, decode, number)
        messages = [m for letter in world.letters for m in decode_packet(letter.data).messages]
        hellos.append(sum(isinstance(message, Hello) for message in messages))
        world.run()
        world.advance(pause_s)
    assert hellos == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("how", ["says goodbye", "is forgotten", "falls silent", "is idle"])
def test_only_the_connection_to_a_peer_that_was_idle_is_kept(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, (prefill,), decode = world_of(idle_s=10.0)
    ask(world, prefill, decode, 1)
    world.run()
    removed = list[bool]()
    monkeypatch.setattr(decode.nic, "remove_remote_agent", lambda name, *, keep: removed.append(keep))
    if how == "says goodbye":
        say(world, prefill, decode, Goodbye())
    elif how == "is forgotten":
        decode.core.decode.forget(prefill.address, world.time(decode))
    elif how == "falls silent":
        ask(world, prefill, decode, 2, lend=False)
        world.run()
        quiet(world, decode, 20.0)
    else:
        world.advance(20.0)
    world.settle(decode)
    assert removed == [how == "is idle"]
    told_as = {"says goodbye": How.GOODBYE, "is forgotten": How.FORGOTTEN, "falls silent": How.SILENT}
    [peer] = decode.core.decode.peers.by_place.values()
    assert peer.how == told_as.get(how, How.IDLE)


def test_a_rank_is_pinged_while_something_is_owed_there_and_never_else() -> None:
    world, (prefill,), decode = world_of(heartbeat_s=0.25)
    ask(world, prefill, decode, 0)
    world.deliver_all()
    pings = [message for message in quiet(world, decode, 0.9) if isinstance(message, Ping)]
    assert len(pings) == 3
    world.run()
    assert not decode.core.decode.pulls
    assert quiet(world, decode, 60.0) == []


def test_our_own_absence_is_no_silence_of_theirs() -> None:
    """A process that was stopped for longer than `gone_s` has their answers yet to read, and has yet to ask."""
    world, _, decode, pull = asking(0)
    world.deliver_all()
    world.letters.clear()
    world.now += 20.0
    world.tick(decode)
    assert reason(pull) is None
    world.run()
    assert pull.reason is Reason.COMPLETE


# -- whose answers count ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "token"),
    [({"sender": "another start"}, ""), ({"target": "another start"}, ""), ({}, "f" * 32)],
    ids=["from another start", "for another start", "of another request"],
)
def test_answers_that_are_meant_for_another_change_nothing(how: dict[str, str], token: str) -> None:
    """Whatever they say: a promise, a refusal, that it is not lent, that a release was heard."""
    world, prefill, decode, pull = asking(0, claim_retry_s=60.0)
    world.deliver()
    world.deliver()
    (claim,) = (message for message in said(world, decode) if isinstance(message, Claim))
    key = msgspec.structs.replace(claim.key, token=token or claim.key.token)
    for answer in (
        Granted(key, claim.pull_id, claim.nonce, 600.0, 50.0),
        Refused(key, claim.pull_id, claim.nonce, Reason.UNKNOWN),
        NotYet(key, claim.pull_id, claim.nonce),
        Ack(key, claim.pull_id),
    ):
        say(world, prefill, decode, answer, **how)
    assert state(pull) is PullState.READING
    world.complete_all()
    assert state(pull) is PullState.CONFIRMING
    say(world, prefill, decode, Granted(claim.key, claim.pull_id, claim.nonce, 600.0, 50.0))
    assert [type(message) for message in said(world, decode)] == [Release]
    for answer in (Ack(key, claim.pull_id), Refused(key, claim.pull_id, 0, Reason.UNKNOWN)):
        say(world, prefill, decode, answer, **how)
    assert state(pull) is PullState.NOTIFYING
    say(world, prefill, decode, Ack(claim.key, claim.pull_id))
    assert state(pull) is PullState.RELEASED


def test_an_acknowledgement_before_the_release_counts_for_nothing() -> None:
    """An acknowledgement that comes before the release would leave its lease to run out."""
    world, prefill, decode, pull = asking(0)
    world.deliver_all()
    say(world, prefill, decode, Ack(pull.params.key, pull.pull_id))
    world.run()
    assert (pull.reason, pull.sources[0].releases) == (Reason.COMPLETE, 1)
    assert prefill.core.is_idle


def test_a_welcome_answers_the_handshake_under_way_and_no_other() -> None:
    """Not one that was given up, not one with another address, and not one of another start of the reader."""
    world, (prefill, other), decode = world_of(2, handshake_s=1.0, backoff_s=0.1, hello_retry_s=0.5)
    pull = ask(world, prefill, decode, 0)
    (early,) = said(world, decode)
    quiet(world, decode, 1.2)
    assert reason(pull) is Reason.UNREACHABLE
    pull = ask(world, prefill, decode, 1)
    (hello,) = (message for message in said(world, decode) if isinstance(message, Hello))
    assert isinstance(early, Hello)
    sender = prefill.core.identity.incarnation
    for speaker, asked, target in ((prefill, early, ""), (other, hello, ""), (prefill, hello, "another start")):
        say(world, speaker, decode, welcome(world, prefill, asked), sender, target)
        assert pull.state is PullState.CONNECTING
        assert said(world, decode) == []
    say(world, prefill, decode, welcome(world, prefill, hello))
    assert [type(message) for message in said(world, decode)] == [Claim]


def welcome(world: World, rank: Rank, hello: Hello) -> Message:
    rank.core.receive(ReplyTo(b"d"), encode_packet("reader", "", [hello]), world.time(rank))
    world.settle(rank)
    (answer,) = said(world, rank)
    return answer


@pytest.mark.parametrize(
    ("sender", "target", "is_over"), [("", "", True), ("another start", "", False), ("", "another start", False)]
)
def test_a_goodbye_ends_the_start_that_says_it_to_whom_it_says_it(sender: str, target: str, is_over: bool) -> None:
    world, prefill, decode, pull = asking(0)
    world.deliver_all()
    say(world, prefill, decode, Goodbye(), sender, target)
    world.complete_all()
    world.run()
    assert pull.reason is (Reason.PEER_LOST if is_over else Reason.COMPLETE)


@pytest.mark.parametrize("nonce", [0, 1])
def test_that_a_process_was_started_anew_is_believed_as_an_answer_only(nonce: int) -> None:
    """Whoever listens at an address may say so; a nonce that was never used, or no release, makes it hearsay."""
    world, prefill, decode, pull = asking(0)
    world.deliver_all()
    say(world, prefill, decode, Refused(pull.params.key, pull.pull_id, nonce, Reason.RESTARTED), "another start")
    world.run()
    assert pull.reason is Reason.COMPLETE


@pytest.mark.parametrize("answer", ["a welcome", "a refusal"])
def test_an_answer_from_another_start_says_that_the_one_that_was_asked_is_gone(answer: str) -> None:
    """Whoever reads from it fails at once: what it had lent is gone with it."""
    world, prefill, decode, pull = asking(0)
    if answer == "a welcome":
        (hello,) = said(world, decode)
        assert isinstance(hello, Hello)
        say(world, prefill, decode, welcome(world, prefill, hello), "another start")
    else:
        world.deliver()
        world.deliver()
        (claim,) = (message for message in said(world, decode) if isinstance(message, Claim))
        refused = Refused(claim.key, claim.pull_id, claim.nonce, Reason.RESTARTED, "another listens here")
        say(world, prefill, decode, refused, "another start")
        world.complete_all()
    assert pull.reason is Reason.RESTARTED


@pytest.mark.parametrize("is_suspect", [False, True])
def test_one_address_serves_one_start_of_a_process_at_a_time(is_suspect: bool) -> None:
    """Once another start is met there, the one before it has ended, and so has what reads from it."""
    world, prefill, decode, pull = asking(0, heartbeat_s=0.25, suspect_s=1.0)
    world.deliver_all()
    (peer,) = decode.core.decode.peers.by_place.values()
    while is_suspect and peer.state is not PeerState.SUSPECT:
        world.advance(0.25)
        world.letters.clear()
    again = world.add("p0", prefill.buffers.layout, engine_id="prefill0")
    assert again.address == prefill.address
    other = ask(world, again, decode, 1)
    world.deliver_all()
    world.complete_all()
    world.run()
    assert (pull.reason, other.reason) == (Reason.RESTARTED, Reason.COMPLETE)


def outcome_and_hellos(world: World, prefill: Rank, decode: Rank, number: int) -> tuple[Reason | None, int]:
    """Ask for something, and return how it ended at once and how many hellos were said for it."""
    said(world, decode)
    pull = ask(world, prefill, decode, number)
    return pull.reason, sum(isinstance(message, Hello) for message in said(world, decode))


def test_a_rank_that_was_lost_is_left_in_peace_for_a_moment_and_then_met_anew() -> None:
    """Meanwhile whoever wants to read from it hears at once, and for the same cause."""
    world, (prefill,), decode = world_of(backoff_s=0.5)
    ask(world, prefill, decode, 0)
    world.deliver_all()
    say(world, prefill, decode, Goodbye())
    assert outcome_and_hellos(world, prefill, decode, 1) == (Reason.PEER_LOST, 0)
    world.advance(0.6)
    assert outcome_and_hellos(world, prefill, decode, 2) == (None, 1)


# -- who was lost is met anew with a probe ------------------------------------------------------------------


def dead(**pull: Any) -> tuple[World, Rank, Rank]:
    """A reader of a process that was killed while it was read, when the pause after that is over."""
    world, prefill, decode, lost = asking(0, backoff_s=0.5, suspect_s=1.0, **pull)
    world.deliver_all()
    (transfer_id,) = decode.reads
    del world.ranks["p0"]
    world.tell(decode, TransferEnded(transfer_id, Ending.FAILED, "NIXL_ERR_REMOTE_DISCONNECT", True))
    assert (lost.reason, lost.is_over) == (Reason.PEER_LOST, True)
    world.run(0.6)
    return world, prefill, decode


def ask_the_dead(world: World, prefill: Rank, decode: Rank, number: int) -> Pull:
    params = world.params([prefill], f"r{number}", [number], 4, written=True)
    return world.pull(decode, f"d{number}", [number], params)


def test_a_pull_from_a_process_that_was_lost_hears_soon_that_it_is_gone() -> None:
    """Not after `handshake_s`, and as what it is."""
    world, prefill, decode = dead(handshake_s=5.0)
    pull = ask_the_dead(world, prefill, decode, 1)
    world.run(0.9)
    assert reason(pull) is None
    world.run(0.2)
    assert reason(pull) is Reason.PEER_LOST
    assert "was lost before, and has said nothing since" in pull.detail


def test_no_release_is_repeated_to_a_process_that_is_gone() -> None:
    """Neither who has asked for blocks nor who has announced; drains and closings would wait for it."""
    world, prefill, decode = dead(release_timeout_s=30.0)
    pull = ask_the_dead(world, prefill, decode, 1)
    world.run(1.1)
    assert (reason(pull), pull.is_over) == (Reason.PEER_LOST, True)
    world.run(2.0)
    params = world.params([prefill], "r2", [2], 4, written=True)
    announced = world.announce(decode, "d2", params, 300.0)
    world.run(1.1)
    world.cancel(decode, "d2")
    world.run(1.1)
    assert announced.is_over
    world.run(5.0)
    world.discharge(decode, "d3", world.params([prefill], "r3", [3], 4, written=True))
    assert not decode.core.is_idle  # it may live after all: another word is worth a second
    world.run(1.1)
    assert decode.core.is_idle
    world.check()


def test_a_process_that_was_lost_and_answers_a_ping_has_all_the_time_of_a_handshake() -> None:
    """Only its data plane may have died, and the next one takes a moment; until then no hello is answered."""
    world, (prefill,), decode = world_of(backoff_s=0.5, suspect_s=1.0, handshake_s=5.0)
    ask(world, prefill, decode, 0)
    world.deliver_all()
    world.lose_agent(prefill)
    world.run(0.6)
    pull = ask(world, prefill, decode, 1)
    for _ in range(15):
        world.run(0.2)
    assert reason(pull) is None
    world.replace_agent(prefill)
    world.run(0.5)
    assert reason(pull) is Reason.COMPLETE


def test_a_loop_that_was_away_while_a_probe_ran_reads_what_came_before_it_judges() -> None:
    world, (prefill,), decode = world_of(backoff_s=0.5, suspect_s=1.0, handshake_s=5.0)
    ask(world, prefill, decode, 0)
    world.deliver_all()
    say(world, prefill, decode, Goodbye())
    world.run(0.6)
    pull = ask(world, prefill, decode, 1)
    world.now += 3.0  # the answers wait unread
    world.tick(decode)
    assert reason(pull) is None
    world.run(0.5)
    assert reason(pull) is Reason.COMPLETE


def test_the_pause_between_probes_doubles_and_ends_with_an_answer() -> None:
    world, prefill, decode = dead(max_backoff_s=4.0)
    begun = list[float]()
    for number in range(1, 400):
        if ask_the_dead(world, prefill, decode, number).reason is None:
            begun.append(world.now)
            world.run(1.05)
        world.run(0.05)
    waits = [round(b - a - 1.0) for a, b in itertools.pairwise(begun)][1:]
    assert waits[:4] == [1, 2, 4, 4], waits
    world.ranks["p0"] = prefill
    world.run(5.0)
    pull = ask(world, prefill, decode, 401)
    world.run(0.5)
    assert reason(pull) is Reason.COMPLETE


def test_what_no_handshake_can_change_is_not_asked_again_for_as_long_as_it_is_remembered() -> None:
    """Another version or another geometry stays what it is for as long as that process runs."""
    world, (prefill,), decode = world_of(backoff_s=0.5, release_timeout_s=1.0)
    ask(world, prefill, decode, 0)
    (hello,) = said(world, decode)
    assert isinstance(hello, Hello)
    say(world, prefill, decode, Unwelcome(hello.nonce, Reason.PROTOCOL, "upgrade"))
    for number in range(1, 6):
        world.advance(10.0)
        assert outcome_and_hellos(world, prefill, decode, number) == (Reason.PROTOCOL, 0)
    world.advance(61.0)
    assert outcome_and_hellos(world, prefill, decode, 6) == (None, 1)


def test_params_that_name_another_for_a_rank_that_is_known_read_nothing_from_it() -> None:
    """It was met as what it is: a list of endpoints with a mistake in it must not fetch another engine's blocks."""
    world, (prefill,), decode = world_of()
    ask(world, prefill, decode, 0)
    world.run()
    params = msgspec.structs.replace(world.params([prefill], "r", [1], 4, written=True), engine_id="somebody else")
    pull = world.pull(decode, "d", [1], params)
    assert pull.reason is Reason.WRONG_TARGET
    assert "correct the endpoints" in pull.detail
    assert decode.reads == {}


@pytest.mark.parametrize("order", list(itertools.permutations(["right", "wrong", "wrong too", "right too"])))
def test_a_wrong_name_for_a_rank_that_is_being_met_is_the_end_of_those_who_gave_it(order: tuple[str, ...]) -> None:
    world, (prefill,), decode = world_of()
    pulls: dict[str, Pull] = {}
    for number, name in enumerate(order):
        params, _ = world.lent(prefill, name, [number], written=True)
        if name.startswith("wrong"):
            params = msgspec.structs.replace(params, engine_id=name)
        pulls[name] = world.pull(decode, name, [number], params)
    world.run()
    assert [pulls[name].reason for name in sorted(order)] == [Reason.COMPLETE] * 2 + [Reason.WRONG_TARGET] * 2
    world.run(10.0)
    assert not decode.core.decode.pulls


def test_metadata_that_was_changed_on_the_way_is_not_loaded() -> None:
    """It says where a data plane reaches: what is loaded is what its owner has summed up."""
    world, prefill, decode, pull = asking(0)
    (hello,) = said(world, decode)
    assert isinstance(hello, Hello)
    say(world, prefill, decode, msgspec.structs.replace(welcome(world, prefill, hello), metadata=b"elsewhere"))
    assert pull.reason is Reason.PROTOCOL
    assert "does not match the digest" in pull.detail


def test_what_is_said_to_another_start_is_not_taken_by_its_successor() -> None:
    """It answers who it is, so that nobody waits; but it grants, strikes off and welcomes nothing."""
    world, prefill, decode, pull = asking(0)
    world.deliver()
    world.deliver()
    hello, claim = Hello(9, 1, 2, "prefill0", 0, decode.core.cohort), said(world, decode)[-1]
    assert isinstance(claim, Claim)
    release = Release(claim.key, claim.request_id, claim.cohort, pull.pull_id, Outcome.COMPLETE)
    messages: list[Message] = [hello, claim, Renew(claim.key, claim.pull_id, 7, 1.0), release]
    prefill.core.receive(ReplyTo(b"d"), encode_packet("reader", "another start", messages), world.time(prefill))
    world.settle(prefill)
    answers = said(world, prefill)
    assert [type(message) for message in answers] == [Unwelcome, Refused, Refused, Refused]
    assert {message.reason for message in answers if isinstance(message, Unwelcome | Refused)} == {Reason.RESTARTED}
    (lent,) = prefill.inspect.requests(world.time(prefill))
    assert [(rank.rank, rank.state) for rank in lent.ranks] == [("*", "unclaimed")]


def test_questions_for_the_status_cost_what_handshakes_cost() -> None:
    """To count everything takes long where there is much: no stranger has it done a thousand times a second."""
    world, (prefill,), _ = world_of()
    stranger = Port(world, "world://stranger", "s")
    stranger.open()
    for number in range(1000):
        stranger.send(prefill.address, encode_packet("stranger", "", [StatusRequest(number)]))
    for _ in range(1000):
        world.deliver()
    assert len(said(world, prefill)) == prefill.core.config.limits.hello_burst


# -- who is meant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "tp_size"),
    [([(0, 0), (0, 0)], 1), ([(0, 0), (0, 0)], 2), ([(0, 0), (0, 1), (0, 1)], 2), ([(0, 0), (0, 2)], 2), ([(1, 0)], 1)],
)
def test_a_group_lists_each_of_its_ranks_once(places: list[tuple[int, int]], tp_size: int) -> None:
    """Where one is listed twice nobody knows which of the two has the blocks; and none may be missing or invented."""
    world, (prefill,), decode = world_of()
    endpoints = tuple(
        Endpoint(rank, Address(f"world://{number}"), f"start {number}", stage)
        for number, (stage, rank) in enumerate(places)
    )
    with pytest.raises(ConfigError, match="one endpoint for each of its ranks"):
        PrefillRanks("prefill0", endpoints, tp_size=tp_size)
    params = world.params([prefill], "r", [0], 4, written=True)
    params = msgspec.structs.replace(params, endpoints=endpoints, tp_size=tp_size)
    with pytest.raises(PlanRefused, match="must be listed once"):
        world.pull(decode, "d", [0], params)
    assert world.letters == []


# -- who stands in for whom -------------------------------------------------------------------------------


def replicas(**pull: Any) -> tuple[World, Rank, Rank, Rank]:
    """Two prefill ranks that hold the same single head, and a decode rank that needs one of them."""
    world = World(EngineConfig(engine_id="x", pull=PullConfig(**pull)))
    first, second = (world.add(f"p{r}", make_layout(r, 2, num_heads=1), engine_id="p") for r in (0, 1))
    return world, first, second, world.add("d", make_layout(num_heads=1))


def lent(world: World, ranks: tuple[Rank, ...], number: int) -> KVTransferParams:
    params, _ = world.lent_by(ranks, f"r{number}", [1, 2])
    return params


def test_a_rank_that_missed_a_handshake_is_read_again_by_those_who_come_later() -> None:
    """That another stood in for it is no rule: it is tried again when its pause is over."""
    world, first, second, decode = replicas(handshake_s=1.0)
    world.announce(decode, "long", lent(world, (first, second), 0), 300.0)
    away = world.ranks.pop("p0")
    for _ in range(12):
        world.run(0.25)
    pull = world.pull(decode, "d1", [1, 2], lent(world, (first, second), 1))
    for _ in range(8):
        world.run(0.25)
    assert (pull.reason, [source.plan is not None for source in pull.sources]) == (Reason.COMPLETE, [False, True])
    world.ranks["p0"] = away
    for _ in range(20):
        world.run(0.25)
    for number in (2, 3):
        pull = world.pull(decode, f"d{number}", [1, 2], lent(world, (first, second), number))
        for _ in range(4):
            world.run(0.25)
    assert [source.plan is not None for source in pull.sources] == [True, False]


def announced_at_a_replaced_peer() -> tuple[World, Rank, Pull, KVTransferParams, Address]:
    """An announcement whose second rank was lost, and met anew by a request that has ended since."""
    world, first, second, decode = replicas(idle_s=30.0)
    params = lent(world, (first, second), 0)
    pull = world.announce(decode, "q", params, 300.0)
    world.run()
    address = next(source.address for source in pull.sources if not source.reads)
    world.forget(decode, address)
    world.run(2.0)
    other = world.pull(decode, "q2", [7, 8], lent(world, (first, second), 1))
    world.run(1.0)
    assert other.is_over
    return world, decode, pull, params, address


def test_a_pull_that_owes_a_release_at_a_place_hears_when_the_process_met_there_anew_is_gone() -> None:
    """The same start of the same process: nobody waits for an acknowledgement that cannot come."""
    world, decode, pull, _, address = announced_at_a_replaced_peer()
    world.cancel(decode, "q")
    world.letters[:] = [letter for letter in world.letters if letter.to != address]
    world.run()
    world.letters.clear()
    assert not pull.is_over
    world.forget(decode, address)
    assert pull.is_over


def test_a_rank_that_was_forgotten_long_ago_keeps_no_pull_from_beginning() -> None:
    world, decode, _, params, address = announced_at_a_replaced_peer()
    world.forget(decode, address)
    for _ in range(100):
        world.run(1.0)
    pull = world.pull(decode, "q", [5, 6], params)
    world.run()
    assert pull.reason is Reason.COMPLETE


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_a_pull_whose_blocks_are_given_up_leaves_its_peer_in_peace_once_its_release_is_settled(
    is_acknowledged: bool,
) -> None:
    """Acknowledged or given up: nothing is waited for any more, so nobody is asked whether he lives."""
    world, prefill, decode = opened(pull=PullConfig(held_s=3.0, release_timeout_s=20.0, idle_s=30.0))
    params, _ = world.lent(prefill, "r", [1, 2])
    pull = world.pull(decode, "q", [3, 4], params)
    world.deliver_all()
    (transfer,) = decode.reads
    world.tell(decode, TransferEnded(transfer, Ending.IN_DOUBT, "doubt"))

    def live(seconds: float, *, hears_releases: bool) -> None:
        for _ in range(int(seconds * 4)):
            world.advance(0.25)
            for letter in list(world.letters):
                said = decode_packet(letter.data).messages
                if not hears_releases and any(isinstance(message, Release) for message in said):
                    world.letters.remove(letter)
            world.deliver_all()

    live(5.0, hears_releases=False)
    assert (pull.is_retired, pull.state) == (True, PullState.NOTIFYING)
    live(20.0, hears_releases=is_acknowledged)
    assert state(pull) is PullState.QUARANTINED
    pings = decode.core.outbox.counters["sent.ping"]
    live(60.0, hears_releases=True)
    assert decode.core.outbox.counters["sent.ping"] == pings


def test_a_rank_that_was_told_is_left_in_peace_while_another_may_still_write() -> None:
    """What is in doubt at one rank is no reason to ask another for ten minutes whether it lives."""
    world = World(EngineConfig(engine_id="x", pull=PullConfig(drain_s=1.0, idle_s=30.0)))
    first, second = (world.add(f"p{r}", make_layout(r, 2), engine_id="p") for r in (0, 1))
    decode = world.add("d", make_layout())
    pull = world.pull(decode, "q", [3, 4], lent(world, (first, second), 0))
    world.deliver_all()
    doubtful = next(t for t, transfer in decode.reads.items() if transfer.agent_name == "agent-p0")
    world.tell(decode, TransferEnded(doubtful, Ending.IN_DOUBT, "trouble"))
    for transfer_id in [t for t in decode.reads if t != doubtful]:
        world.complete(decode, transfer_id)
    world.deliver_all()
    assert pull.state is PullState.QUARANTINED
    asked = set()
    for _ in range(60):
        world.advance(0.25)
        asked |= {letter.receiver.name for letter in world.letters if not letter.answer}
        world.deliver_all()
    assert asked == {"p0"}
    world.complete(decode, doubtful)
    assert pull.is_over


def test_a_table_that_is_refused_when_the_time_is_up_returns_the_blocks() -> None:
    """To prepare a table takes a while: its end, and the deadline, may be found in the same breath."""
    world, prefill, decode, pull = asking(0, timeout=5.0, drain_s=1.0)
    others = [ask(world, prefill, decode, number) for number in (1, 2)]
    world.deliver_all()
    transfer_id = next(iter(decode.reads))
    world.now += 10.0
    world.tell(decode, TransferEnded(transfer_id, Ending.REFUSED, "memory of two kinds"))
    assert (pull.is_returned, pull.reason) == (True, Reason.GEOMETRY)
    world.run()
    assert {reason(other) for other in others} == {Reason.GEOMETRY}
    world.check()


# -- endpoints that params made up -----------------------------------------------------------------------


def made_up(world: World, prefill: Rank, number: int, tp_size: int, **changed: Any) -> KVTransferParams:
    """Params of a prefill rank with the addresses of so many others, which nobody listens at."""
    params = world.params([prefill], f"made up {number}", [3], 4, written=True)
    endpoints = tuple(Endpoint(r, f"tcp://10.0.{number}.{r}:1", f"start-{number}-{r}") for r in range(tp_size))
    given: dict[str, Any] = {"endpoints": endpoints, "tp_size": tp_size} | changed
    return msgspec.structs.replace(params, **given)


def test_params_that_name_very_many_ranks_or_one_rank_twice_are_refused_before_anything_is_asked() -> None:
    world, prefill, decode = opened()
    twice = Endpoint(0, "tcp://10.0.0.1:1", "start")
    for params, why in (
        (made_up(world, prefill, 1, MAX_SOURCES + 1), f"{MAX_SOURCES + 1} x 1 prefill ranks, more than {MAX_SOURCES}"),
        (made_up(world, prefill, 2, 2, endpoints=(twice, msgspec.structs.replace(twice, tp_rank=1))), "one process"),
    ):
        with pytest.raises(PlanRefused, match=why):
            world.pull(decode, f"pull {why}", [9], params)
    assert not decode.core.decode.peers.by_place
    assert not said(world, decode)


def test_ranks_of_one_engine_that_never_answered_keep_those_of_others_not_out() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "honest", [3], written=True)
    for number in range(1, 7):
        world.pull(decode, f"pull {number}", [number], made_up(world, prefill, number, 128, engine_id="made up"))
    assert len(decode.core.decode.peers.by_place) == MAX_UNMET // 4
    honest = world.pull(decode, "honest", [9], params)
    world.run()
    assert honest.outcome is Outcome.COMPLETE


def test_what_is_left_of_an_engines_earlier_starts_is_none_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_UNMET", 8)
    world = World()
    decode = world.add("decode", make_layout(), seed=1)
    for start in range(4):
        prefill = world.add(f"start {start}", make_layout(), engine_id="prefill")
        params, _ = world.lent(prefill, f"r{start}", [3], written=True)
        pull = world.pull(decode, f"d{start}", [9], params)
        world.run()
        assert pull.outcome is Outcome.COMPLETE
        decode.core.decode.forget(Address(params.endpoints[0].address), world.time(decode))
    assert [p.state for p in decode.core.decode.peers.by_place.values()] == [PeerState.GONE] * 4


def places(decode: Rank) -> Counter[str]:
    return Counter(peer.engine_id for peer in decode.core.decode.peers.by_place.values())


def test_ranks_that_never_answered_are_bounded_in_all_and_the_oldest_of_the_engine_with_most_give_way() -> None:
    world, prefill, decode = opened()

    def read(name: str, block: int) -> Pull:
        params, _ = world.lent(prefill, name, [block], written=True)
        return world.pull(decode, name, [block], params)

    def name(request_id: str, block: int, number: int, size: int, engine_id: str) -> Pull:
        pull = world.pull(decode, request_id, [block], made_up(world, prefill, number, size, engine_id=engine_id))
        world.advance(0.05)  # requests of so many unknown ranks take turns
        return pull

    pulls = [
        name(f"pull {number}", number, number, size, f"e{number}")
        for number, size in enumerate((128, 127, 127, 127, 3))
    ]
    assert places(decode) == {"e0": 128, "e1": 127, "e2": 127, "e3": 127, "e4": 3}
    met = read("met", 10)
    assert places(decode) == {"e0": 127, "e1": 127, "e2": 127, "e3": 127, "e4": 3, "prefill": 1}
    assert {reason(pull) for pull in pulls} == {None}, "who is to be read goes last"
    single = name("single", 8, 5, 1, "e0")
    name("many", 9, 6, 128, "e0")
    assert (reason(single), places(decode)["e0"]) == (Reason.UNREACHABLE, 128)
    assert "tcp://10.0.5.0:1) has not answered, and gave way to others" in single.detail
    world.settle(decode)
    world.run()
    assert met.outcome is Outcome.COMPLETE
    # Who has answered takes none of the room, and neither does its end.
    decode.core.decode.forget(Address(prefill.endpoint.address), world.time(decode))
    world.pull(decode, "one more", [11], made_up(world, prefill, 9, 1, engine_id="e4"))
    assert places(decode) == {"e0": 128, "e1": 126, "e2": 127, "e3": 127, "e4": 4, "prefill": 1}
    # Those that never answer are forgotten in the end, and their links closed.
    world.run(120.0)
    assert not decode.core.decode.peers.by_place
    assert not decode.core.decode.pulls
    world.check()


@pytest.mark.parametrize("how", ["discharge", "let_go"])
def test_releases_to_ranks_that_never_answered_give_way_before_reads_and_are_told(how: str) -> None:
    """Whoever writes params chooses the engine id: 128 made-up ranks of the honest engine must not keep it away."""
    world, prefill, decode = opened()
    core, now = decode.core, world.time(decode)
    waits = world.pull(decode, "waits", [1], made_up(world, prefill, 1, 1))
    for number in (2, 3):
        params = made_up(world, prefill, number, 127)
        if how == "discharge":
            core.discharge(f"evil {number}", params, "", now)
        else:
            core.let_go(PullRequest(f"evil {number}", (), params), Reason.CANCELLED, now)
        assert places(decode) == {"prefill": 128}
    told = [c for c in core.outbox.commands if isinstance(c, ReleaseUnanswered)]
    assert [c.request_id for c in told] == ["evil 2"] * 127
    assert set(core.outbox.unlinked) == {f"tcp://10.0.2.{r}:1" for r in range(127)}
    params, _ = world.lent(prefill, "honest", [3], written=True)
    honest = world.pull(decode, "honest", [9], params)
    world.settle(decode)
    world.deliver_all()
    assert reason(waits) is None
    world.run()
    assert honest.outcome is Outcome.COMPLETE


def test_a_request_that_is_refused_displaces_no_rank() -> None:
    world, prefill, decode = opened()
    pull = world.pull(decode, "same", [1], made_up(world, prefill, 1, 128))
    before = set(decode.core.decode.peers.by_place)
    with pytest.raises(LocalProtocolError, match="is being pulled already"):
        world.pull(decode, "same", [2], made_up(world, prefill, 2, 128))
    assert set(decode.core.decode.peers.by_place) == before
    assert pull.reason is None


def test_a_rank_that_gave_way_before_it_was_needed_is_released_in_the_end_and_its_link_closed() -> None:
    world, prefill, decode = opened()
    core, now = decode.core, world.time(decode)
    params = made_up(world, prefill, 1, 1)
    pull = core.announce("announced", params, "", 300.0, now)
    [source], [peer] = pull.sources, core.decode.peers.by_place.values()
    source.not_wanted()  # as one of which nothing is read
    core.decode.peers.failed(peer, Reason.UNREACHABLE, "", now)
    core.discharge("evil", made_up(world, prefill, 2, 128), "", now)
    assert peer.place not in core.decode.peers.by_place
    assert reason(pull) is None
    core.outbox.commands.clear()
    core.outbox.take_packets()
    core.cancel("announced", now)
    assert [to for to, _ in core.outbox.take_packets()] == [peer.address]
    assert peer.address in core.outbox.unlinked
    assert (pull.is_over, pull.unanswered) == (True, (source.name,))
    world.check()


async def test_a_last_word_to_a_rank_that_gave_way_leaves_no_link_behind() -> None:
    world = World()
    prefill = world.add("prefill", make_layout())
    bench = Bench(False)
    async with bench.pair() as (_, decode, _):
        for number, call in ((1, decode.engine.announce), (2, decode.engine.cancel)):
            call(f"d{number}", made_up(world, prefill, number, 128))
            bench.clock.advance(0.05)
            await turn_loop(10)
        control = decode.engine._driver.control
        assert isinstance(control, SimControl)
        assert {address.split(".")[2] for address in control.links} == {"2"}


# -- many unknown ranks ------------------------------------------------------------------------------------


def test_unknown_ranks_are_greeted_a_few_at_a_time_and_those_of_the_request_with_the_fewest_come_first() -> None:
    """A client names endpoints that do not exist; each hello costs a link, log lines and timers."""
    world = World()
    prefill, decode = world.add("prefill", make_layout()), world.add("decode", make_layout(num_blocks=32), seed=1)
    found = decode.core.decode.peers

    def num_greeted() -> int:
        return sum(p.state is PeerState.CONNECTING for p in found.by_place.values())

    for number in range(14):
        world.pull(decode, f"tampered {number}", [number], made_up(world, prefill, number, 16, engine_id=f"e{number}"))
    assert num_greeted() == peers.GREETING_BURST
    params, _ = world.lent(prefill, "honest", [3], written=True)
    honest = world.pull(decode, "honest", [20], params)
    world.advance(1 / peers.GREETINGS_PER_S)
    world.run()
    assert honest.outcome is Outcome.COMPLETE
    world.advance(0.05)
    assert peers.GREETING_BURST < num_greeted() <= peers.GREETING_BURST + 0.06 * peers.GREETINGS_PER_S
    for number in range(14):
        world.cancel(decode, f"tampered {number}")
    assert not found.waiting, "whoever gave up waits for nothing"
    world.check()


def test_a_request_of_several_new_ranks_is_not_passed_over_by_requests_of_one_rank_without_end() -> None:
    world = World()
    ranks = [world.add(f"p{rank}", make_layout(rank, 2), engine_id="prefill") for rank in range(2)]
    decode = world.add("decode", make_layout(num_blocks=32), seed=1)
    numbers = iter(range(1, 200))

    def invent(most: int) -> None:
        for number in itertools.islice(numbers, most):
            decode.core.announce(f"r{number}", made_up(world, ranks[0], number, 1), "", 300.0, world.time(decode))

    invent(peers.GREETING_BURST + 20)
    params, _ = world.lent_by(ranks, "honest", [3], written=True)
    honest = world.pull(decode, "honest", [20], params)
    for _ in range(60):
        world.advance(1 / peers.GREETINGS_PER_S)
        invent(2)
    world.run()
    assert honest.outcome is Outcome.COMPLETE


def test_requests_of_many_unknown_ranks_take_turns_and_few_ranks_wait_for_none() -> None:
    """Fifty tampered requests in one turn of the loop would hold it up for half a second."""
    world = World()
    prefill, decode = world.add("prefill", make_layout()), world.add("decode", make_layout(num_blocks=32), seed=1)
    core, now = decode.core, world.time(decode)
    params = {n: made_up(world, prefill, n, 128) for n in range(1, 13)}
    calls = (
        lambda n: world.pull(decode, f"r{n}", [n], params[n]),
        lambda n: core.announce(f"r{n}", params[n], "", 300.0, now),
        lambda n: core.let_go(PullRequest(f"r{n}", (), params[n]), Reason.CANCELLED, now),
    )
    for number in range(1, 13):
        calls[number % 3](number)
    met = {address.split(".")[2] for address, _ in core.decode.peers.by_place}
    assert met == {"1"}
    few = world.pull(decode, "few", [20], made_up(world, prefill, 20, 16, engine_id="few"))
    assert places(decode)["few"] == 16
    asked = begin(core, PullRequest("r4", [(0, [21])], params[4]), 30.0, now)
    core.cancel("r7", now)
    for _ in range(14):
        world.advance(0.05)
    assert not core.decode._to_meet
    assert {reason(few), reason(asked)} == {None, Reason.UNREACHABLE}
    world.advance(12.0)
    assert reason(few) is Reason.UNREACHABLE
    world.advance(400.0)
    world.check()
    assert not core.decode.pulls


# -- an agent that has ended, and a rank that is said to be gone -----------------------------------------------


def test_a_rank_whose_agent_has_ended_welcomes_no_reader_until_it_has_another() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "r", [3], written=True)
    world.lose_agent(prefill)
    pull = world.pull(decode, "d", [9], params)
    for _ in range(3):
        kinds = [type(message) for letter in world.letters for message in decode_packet(letter.data).messages]
        assert set(kinds) == {Hello}
        world.deliver_all()
        assert world.letters == []
        world.advance(decode.core.config.pull.hello_retry_s * 4)
    world.replace_agent(prefill)
    while not decode.reads:
        world.deliver_all()
        world.advance(1.0)
    assert {peer.agent_name for peer in decode.core.decode.peers.by_place.values()} == {"agent-prefill-2"}
    world.run()
    assert pull.is_over


def test_a_rank_that_a_router_says_is_gone_has_left_in_good_order() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "r", [3], written=True)
    world.pull(decode, "d", [9], params)
    world.run()
    decode.core.decode.forget(prefill.address, world.time(decode))
    ((peer, before, after),) = [
        (c.peer, c.before, c.after) for c in decode.core.outbox.commands if isinstance(c, PeerReached)
    ]
    assert (peer.is_orderly, before, after) == (True, PeerState.READY, PeerState.GONE)


def test_a_rank_that_was_never_greeted_takes_nobodys_handshake_along_when_it_goes() -> None:
    world = World()
    ranks = [world.add(f"p{r}", make_layout(r, 4, base=(r + 1) << 40, num_heads=2), engine_id="p") for r in range(4)]
    decode = world.add("d", make_layout(base=30 << 40, num_heads=2), engine_id="d")
    params, _ = world.lent_by(ranks, "r", [3], written=True)
    world.pull(decode, "d-r", [9], params)
    greeted = {letter.to for letter in world.letters}
    unmet = [rank for rank in ranks if rank.address not in greeted]
    assert len(greeted) == len(unmet) == 2
    for rank in unmet:
        decode.core.decode.forget(rank.address, world.time(decode))
    world.settle(decode)
    world.deliver_all()
    assert len(decode.reads) == 2
