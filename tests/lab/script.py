"""Scripts of the faults of a simulated service, with their times, drawn from seeds.

A script is plain data. The same seed draws the same one, and a script can be edited by hand and played.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.lab.mishaps import Mishap

FAULTS = (
    "agent",
    "loss",
    "duplicate",
    "delay",
    "partition",
    "crash",
    "freeze",
    "pause",
    "slow",
    "fail",
    "doubt",
    "stuck",
    "cancel",
    "revoke",
    "forget",
    "close",
    "garbage",
    "hostile",
    "drain",
    "sleep",
    "brink",
    "recall",
    "preempt",
    "scribble",
    "flip",
)
"""Kinds of faults that a script may hold."""

BLOCK = 4
"""Tokens per block."""

MILD = ("duplicate", "slow", "fail", "doubt", "stuck", "cancel", "loss")
"""Faults that a release survives, if packets are lost for a short time only."""

SHORT_LOSS_S = 1.3
"""Whatever was lost meanwhile is sent again before any lease runs out."""

LENT, ABORTED, WITHDRAWN = "lent", "aborted", "withdrawn"
"""Fates of a request after its params have left: lent, never lent without a word, or withdrawn."""

DROPPED = "dropped"
"""Fate of a request that is followed: it ends before it has params, and its ticket is withdrawn."""

SOON, MOVING, LANDED = "", "while its bytes move", "when a rank's last byte has landed"
"""Moments of a recall or a scribble: a time, or the first such moment of any reader after that time."""

NEVER_PULLED, AFTER_FAILURE = "discharged", "discharged if its pull fails"
"""When a reader says that it needs nothing of a request: instead of a pull, or of another attempt."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong for a while.

    Attributes:
        kind: One of `FAULTS`.
        who: Names of ranks, or numbers of requests for `cancel`, `revoke`, `recall`, `preempt` (recalled, and lent
            again as a new request) and `brink` (revoked, and then reads end and messages arrive in the last
            milliseconds of its grants, or just after). Of `scribble`, a request in whose lent blocks its owner writes;
            of `flip`, readers, in some of whose reads and looks a byte is changed.
        p: How likely, where that makes sense.
        when: For `recall`, `preempt` and `scribble`: `SOON`, `MOVING` or `LANDED`.
    """

    kind: str
    at: float
    seconds: float
    who: tuple[str, ...] = ()
    p: float = 1.0
    when: str = SOON

    def __str__(self) -> str:
        who = f" {' '.join(self.who)}" if self.who else ""
        if self.when:
            who += f" {self.when}"
        return f"{self.at:8.3f} s  {self.kind}{who} for {self.seconds:.3f} s (p {self.p:.2f})"


@dataclass(frozen=True, slots=True)
class Legs:
    """How a router sends both legs of a request at once, so that its decode engines follow it.

    Attributes:
        ticket: Number of the ticket that both legs bear. Requests with the same number have the same ticket.
        compute_s: Seconds that the prefill engine computes.
        late_s: Seconds by which the decode leg comes later than the prefill leg, about.
        waits_s: Seconds for which the decode engine has no blocks, once the request is offered.
        again_s: Seconds after which each decode engine gets another request with this ticket; none if negative.
        cached_s: Seconds after which the decode engine finds the whole prompt in its cache; never if negative.
        strangers: Decode engines that follow the ticket as well, and are no readers.
        astray: Prefill engine that is followed instead of the one that computes, or -1.
        is_stale: What is followed is an earlier identity of the prefill engine, if it had any.
        is_lost: The prefill leg never arrives.
    """

    ticket: int
    compute_s: float
    late_s: float = 0.0
    waits_s: float = 0.0
    again_s: float = -1.0
    cached_s: float = -1.0
    strangers: tuple[int, ...] = ()
    astray: int = -1
    is_stale: bool = False
    is_lost: bool = False

    def __str__(self) -> str:
        more = [f"{name} {value}" for name in self.__slots__[1:] if (value := getattr(self, name)) not in (0, -1, ())]
        return f"followed by ticket {self.ticket} ({', '.join(more)})"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the service.

    Attributes:
        prefill: Prefill engine that does it.
        ahead: The params travel before the KV is written and lent.
        engines: Decode engines that read it.
        shares: Number of an earlier request with the same first blocks, or -1.
        cached: Tokens that the decode side has already.
    """

    number: int
    at: float
    tokens: int
    ahead: bool
    engines: tuple[int, ...]
    shares: int
    cached: int
    announce_s: float
    retries: int
    lease_s: float = 4.0
    routed_s: float = 0.5
    """Seconds for which the params are under way, at most."""
    prefill: int = 0
    priority: int = 0
    is_engine_retry: bool = False
    """Retries are the engine's, into the same blocks, rather than its caller's."""
    lend_s: float = 0.0
    """Seconds by which it is lent, or aborted, later than usual."""
    fate: str = LENT
    """`LENT`, `ABORTED`, `WITHDRAWN`, or `DROPPED` if it is followed."""
    discharged: str = ""
    """`NEVER_PULLED` or `AFTER_FAILURE` if readers discharge it, then or then; and nothing else of theirs follows."""
    recall: bool = False
    """Its owner may take it back at once."""
    legs: Legs | None = None
    """None: its params go through the router."""

    @property
    def _readers(self) -> str:
        return f" (lent with num_readers={len(self.engines)})" if len(self.engines) > 1 else ""

    def __str__(self) -> str:
        return (
            f"{self.at:8.3f} s  request {self.number}: {self.tokens} tokens, {self.cached} cached, of prefill engine "
            f"{self.prefill}, read by "
            f"{' and '.join(f'engine {e}' for e in self.engines)}{self._readers}"
            f"{', params ahead' if self.ahead else ''}{f', shares with {self.shares}' if self.shares >= 0 else ''}"
            f"{f', announced {self.announce_s:.2f} s before' if self.announce_s else ''}"
            f"{f', priority {self.priority}' if self.priority else ''}"
            f"{f', retried {self.retries} times by the engine' if self.is_engine_retry else ''}"
            f"{f', {self.discharged}' if self.discharged else ''}"
            f"{', may be recalled' if self.recall else ''}{f', {self.legs}' if self.legs else ''}"
            f"{f', {self.fate}' if self.fate != LENT else ''}{f', {self.lend_s:.2f} s late' if self.lend_s else ''}"
        )


@dataclass(frozen=True, slots=True)
class Looks:
    """Second looks of the readers of a service.

    Attributes:
        share, most: Of pulls, and bytes of each rank, as in `PullConfig`.
        num_places: Looks of a rank that run at a time.
    """

    share: float
    most: int | Literal["all"]
    num_places: int


@dataclass(frozen=True, slots=True)
class Script:
    """A seed's script.

    Attributes:
        prefill: Ranks of each prefill engine.
        decode: Ranks of each decode engine.
    """

    seed: int
    prefill: int
    decode: int
    decode_engines: int
    heads: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    seconds: float
    wire: float = 1.0
    """Slowness of packets: a factor of 50 to 250 microseconds."""
    data: float = 1.0
    """Slowness of transfers: a factor of 0.02 to 2 milliseconds."""
    prefill_engines: int = 1
    budget: int = 0
    """Pulls that a decode rank reads at a time from one prefill engine; 0: as many as there are."""
    schedulers: int = 1
    """Of each prefill engine, taking turns."""
    memory: int = 0
    """Endings, and gaps between keys, that a prefill rank remembers; 0: as many as it likes."""
    mishaps: tuple[Mishap, ...] = ()
    """Mishaps of single requests."""
    stages: int = 1
    """Pipeline stages of each decode engine, of `decode` ranks and one layer each; all layers are in each prefill rank.
    Ranks of the second stage follow those of the first: with two ranks per stage `d0.3` is rank 1 of the second."""
    shards: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {"prefill": (1, 1), "decode": (1, 1)})
    """How many neighbouring ranks of a side share tokens, and how many consecutive tokens one of them holds."""
    looks: Looks | None = None
    goes_on: bool = False
    """Owners write their next tokens behind those that are lent, into the same blocks."""

    def explain(self) -> Iterator[str]:
        """Tell what it stands for, but for its requests and faults."""
        yield (
            f"{self.prefill_engines} prefill engines of {self.prefill} ranks, {self.decode_engines} decode engines of "
            f"{self.decode} ranks, {self.heads} KV heads; packets {self.wire:g} times, transfers {self.data:g} times "
            f"as slow as usual"
        )
        if self.stages > 1:
            yield f"{self.stages} pipeline stages of each decode engine"
        for role, (size, turn) in self.shards.items():
            if size > 1:
                yield f"each {size} neighbouring ranks of a {role} engine share tokens, {turn} at a time"
        if self.looks is not None:
            yield f"{self.looks}{', owners go on' if self.goes_on else ''}"
        yield (
            "p0, q0: rank 0 of the first and the second prefill engine; d1.0: rank 0 of decode engine 1; d1.0#2: its "
            "second start"
        )

    @property
    def is_staged(self) -> bool:
        """Whether reads are staged: in every other world, as the two sides' memory orders differ in all."""
        return self.seed % 2 == 1

    @property
    def is_packed(self) -> bool:
        """Whether owners make packed copies: where reads are staged, in every other world."""
        return self.seed % 4 == 3

    @property
    def prefill_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the ranks of each prefill engine."""
        return tuple(tuple(f"{'pq'[e]}{r}" for r in range(self.prefill)) for e in range(self.prefill_engines))

    @property
    def decode_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the ranks of each decode engine."""
        return tuple(tuple(f"d{e}.{r}" for r in range(self.decode * self.stages)) for e in range(self.decode_engines))

    def readers_of(self, rank: int) -> list[int]:
        """Return the ranks of a decode engine that answer for a prefill rank, in all of its stages."""
        size, _ = self.shards["prefill"]
        place, whole = rank // size, self.prefill // size  # neighbours that share tokens are what one rank is otherwise
        owed = [
            d
            for d in range(self.decode)
            if d * whole < (place + 1) * self.decode and place * self.decode < (d + 1) * whole
        ]
        return [stage * self.decode + reader for stage in range(self.stages) for reader in owed]

    @property
    def is_only_hostile(self) -> bool:
        """Nothing goes wrong by itself."""
        return not self.mishaps and all(fault.kind == "hostile" for fault in self.faults)

    @property
    def spared(self) -> frozenset[int]:
        """Prefill engines that no fault touches, nor any of their readers: their requests must not notice any."""
        if self.mishaps:
            return frozenset()
        hit = {name for fault in self.faults for name in fault.who}
        own = [
            {*names, *(str(ask.number) for ask in self.asks if ask.prefill == engine)}
            for engine, names in enumerate(self.prefill_names)
        ]
        return frozenset() if hit - set().union(*own) else frozenset(e for e, mine in enumerate(own) if not hit & mine)

    @property
    def is_long(self) -> bool:
        """It is watched for so long that even what is remembered of the dead must be gone."""
        return self.seed % 10 == 0


def make_script(seed: int, faults: Sequence[str] = FAULTS) -> Script:
    """Draw a service, its requests and its faults from a seed."""
    rng = random.Random(repr(("script", seed)))
    loses_agents, reaches_brinks = "agent" in faults, {"brink", "slow"} <= set(faults)
    recalls = [kind for kind in ("recall", "preempt") if kind in faults]
    changes = [kind for kind in ("scribble", "flip") if kind in faults]
    knows_all = {*FAULTS} <= {*faults, "scribble", "flip"}
    faults = [kind for kind in faults if kind not in ("agent", "brink", "recall", "preempt", "scribble", "flip")]
    if rng.random() < 0.1 and {"slow", "pause"} <= set(faults):
        # A small request, with a reader that is away again and again while its few reads take longer than a promise.
        ask = Ask(0, 0.5, rng.randint(1, 2 * BLOCK), rng.random() < 0.3, (0,), -1, 0, 0.0, 0, 2.0, 0.01)
        long = (Fault("slow", 0.4, 8.0, ("d0.0",), 1.0), Fault("pause", 0.5 + rng.random(), 8.0, ("d0.0",), 0.15))
        return Script(seed, 1, 1, 1, 12, (ask,), long, 9.0)
    prefill, decode = rng.choice([(1, 1), (1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (2, 3), (4, 2)])
    shared = random.Random(repr(("shards", seed)))
    if is_sharing := shared.random() < 0.28:  # a quarter of all
        prefill, decode = shared.choice(
            [(2, 1), (1, 2), (2, 2), (2, 2), (4, 1), (4, 2), (2, 4), (4, 4), (3, 2), (2, 3)]
        )
    engines = rng.choice([1, 1, 1, 2])
    seconds = rng.uniform(3.0, 8.0)
    asks = []
    for number in range(rng.randint(2, 7)):
        tokens = rng.randint(1, 4 * BLOCK)
        cached = rng.choice([0, 0, 0, 0, rng.randint(0, tokens), tokens])
        shares = rng.randrange(number) if number and rng.random() < 0.25 else -1
        both = tuple(range(engines)) if engines == 1 or rng.random() < 0.6 else (rng.randrange(engines),)
        asks.append(
            Ask(
                number,
                rng.uniform(0.0, seconds * 0.7),
                tokens,
                rng.random() < 0.35,
                both,
                shares,
                cached,
                rng.choice([0.0, 0.0, rng.uniform(0.001, 1.0)]),
                rng.choice([0, 1, 2]),
                rng.choice([2.0, 2.0, 4.0]),
                rng.choice([0.5, 0.5, 2.5]),
            )
        )
    asks.sort(key=lambda a: a.at)
    names = [f"p{i}" for i in range(prefill)] + [f"d{e}.{i}" for e in range(engines) for i in range(decode)]
    kinds = list(faults)
    drawn = [_draw(rng, rng.choice(kinds), names, asks, seconds) for _ in range(rng.randint(0, 5) if kinds else 0)]
    if rng.random() < 0.5:
        recipe = rng.choice(RECIPES)
        drawn += _cook(rng, recipe, names, asks, seconds) if set(recipe) <= set(kinds) else []
    heads = rng.choice([12, 12, 12, 1])
    wire, data = rng.choice([1, 1, 20, 400]), rng.choice([1, 1, 30, 400])
    script = Script(seed, prefill, decode, engines, heads, tuple(asks), tuple(drawn), seconds, wire, data)
    script = _sharing(shared, script) if is_sharing else script
    # From here on with dice of its own: what was drawn above stays what it was.
    script = _second_engine(random.Random(repr(("engines", seed))), script, kinds)
    script = _pressed(random.Random(repr(("pressed", seed))), script)
    script = _disordered(random.Random(repr(("disordered", seed))), script)
    if loses_agents:
        script = _without_agent(random.Random(repr(("agent", seed))), script, names)
    script = _staged(random.Random(repr(("staged", seed))), script)
    script = _mild(random.Random(repr(("mild", seed))), script, [kind for kind in MILD if kind in kinds])
    script = _hostile(random.Random(repr(("hostile", seed))), script) if "hostile" in kinds else script
    if reaches_brinks:
        script = _at_the_brink(random.Random(repr(("brink", seed))), script)
    script = _discharged(random.Random(repr(("discharged", seed))), script)
    script = _recalled(random.Random(repr(("recalled", seed))), script, recalls, knows_all)
    return _looked(random.Random(repr(("looked", seed))), script, changes)


def _sharing(rng: random.Random, script: Script) -> Script:
    """Let neighbouring ranks of one side or both share tokens."""
    sizes = itertools.product(*([n for n in (1, 2, 4) if size % n == 0] for size in (script.prefill, script.decode)))
    chosen = rng.choice([both for both in sizes if both != (1, 1)])
    turns = [rng.choice([n for n in (1, 2, 4) if BLOCK // size % n == 0]) for size in chosen]
    shards = dict(zip(("prefill", "decode"), zip(chosen, turns, strict=True), strict=True))
    if chosen[1] == 1:
        return replace(script, shards=shards)
    # Ranks that read share the tokens of one head.
    heads = rng.choice([n for n in (1, 2) if script.decode // chosen[1] % n == 0])
    return replace(script, shards=shards, heads=heads)


def _at_the_brink(rng: random.Random, script: Script) -> Script:
    """Let reads of a small request in some scripts go on until its grants run out."""
    if rng.random() < 0.75:
        return script
    chosen = rng.choice(script.asks)
    ask = replace(chosen, tokens=min(chosen.tokens, BLOCK), cached=0, fate=LENT, announce_s=0.0, routed_s=0.2)
    asks = [ask if each is chosen else each for each in script.asks]
    slow = tuple(name for engine in ask.engines for name in script.decode_names[engine])
    lent_at = ask.at + ask.lend_s
    brink = Fault("brink", lent_at + 0.5 + rng.random(), 0.0, (str(ask.number),))
    faults = (*script.faults, Fault("slow", ask.at, 4.0 + ask.lend_s, slow), brink)
    return replace(script, asks=tuple(asks), faults=faults, seconds=max(script.seconds, lent_at + 5.0))


def _discharged(rng: random.Random, script: Script) -> Script:
    """Let readers of some scripts need nothing of some requests."""
    if rng.random() < 0.75:
        return script
    asks = []
    for ask in script.asks:
        odds = ["", NEVER_PULLED, AFTER_FAILURE] if ask.retries and not ask.is_engine_retry else ["", NEVER_PULLED]
        asks.append(replace(ask, discharged=rng.choice(odds)))
    return replace(script, asks=tuple(asks))


def _recalled(rng: random.Random, script: Script, kinds: Sequence[str], knows_all: bool) -> Script:
    """Let the requests of a third of all scripts be recallable, or some of them; and recall some of those, also twice,
    before they are lent, and after their end.
    """
    if rng.random() < 2 / 3:
        return script
    share = rng.choice([0.5, 1.0])
    script = replace(script, asks=tuple(replace(ask, recall=rng.random() < share) for ask in script.asks))
    if not kinds or (script.faults and (script.is_only_hostile or script.spared)):
        return script  # requests without any other trouble stay so
    script = _sharing_a_prefix(rng, script) if rng.random() < 0.3 else script
    if not (able := [ask for ask in script.asks if ask.recall]):
        return script
    if knows_all and rng.random() < 0.1:
        return _too_late_to_renew(rng, script, rng.choice(able))
    faults = []
    for _ in range(rng.choice([0, 1, 2, 3, 4])):
        ask, when = rng.choice(able), rng.choice([SOON, SOON, MOVING, MOVING, LANDED, LANDED, LANDED])
        at = ask.at + 0.02
        if when == SOON:
            at += rng.random() ** 2 * rng.choice([0.1, 1.0, ask.lend_s + ask.routed_s + 1.5])
        faults += [Fault(rng.choice(kinds), min(at, script.seconds), 0.0, (str(ask.number),), when=when)]
    return replace(script, faults=(*script.faults, *faults))


def _looked(rng: random.Random, script: Script, kinds: Sequence[str]) -> Script:
    """Let readers of a third of all scripts look twice. In half of these, bytes change that should not."""
    if rng.random() < (0.5 if script.is_packed else 0.7):
        return script
    odds: list[int | Literal["all"]] = ["all", "all", "all", 1, 100, 400]
    looks = Looks(rng.choice([1.0, 1.0, 1.0, 1.0, 0.3]), rng.choice(odds), rng.choice([8, 8, 3]))
    is_alone = bool(script.faults) and (script.is_only_hostile or bool(script.spared))
    # Looks take many small transfers, which would not fit into any deadline if each were as slow as it may be.
    script = replace(script, looks=looks, goes_on=rng.random() < 0.6, data=min(script.data, 30))
    faults, kinds = [], rng.choice([kinds, kinds[:1], kinds[:1]])
    for _ in range(0 if is_alone or not kinds else rng.choice([0, 0, 3, 6])):
        kind, ask = rng.choice(kinds), rng.choice(script.asks)
        at = ask.at + 0.02
        if kind == "flip":
            names = [name for names in script.decode_names for name in names]
            who = tuple(rng.sample(names, rng.choice([1, len(names)])))
            faults += [Fault(kind, ask.at, rng.choice([0.5, 3.0]), who, rng.choice([0.05, 0.2, 1.0]))]
            continue
        when = rng.choice([SOON, MOVING, MOVING, LANDED, LANDED, LANDED])
        if when == SOON:
            at += rng.random() ** 2 * rng.choice([0.1, 1.0, ask.lend_s + ask.routed_s + 1.5])
        faults += [Fault(kind, min(at, script.seconds), 0.0, (str(ask.number),), when=when)]
    return replace(script, faults=(*script.faults, *faults))


def _sharing_a_prefix(rng: random.Random, script: Script) -> Script:
    """Let a request be lent beside one that has the same first blocks."""
    if len(script.asks) < 2:
        return script
    first, second = rng.sample(script.asks, 2)
    first = replace(first, tokens=max(first.tokens, BLOCK + 1), recall=True, fate=LENT)
    tokens, at = max(second.tokens, BLOCK + 1), first.at + rng.random() ** 2
    recall = rng.random() < 0.5
    second = replace(second, tokens=tokens, at=at, shares=first.number, prefill=first.prefill, recall=recall, fate=LENT)
    asks = {ask.number: ask for ask in script.asks} | {first.number: first, second.number: second}
    return replace(script, asks=tuple(sorted(asks.values(), key=lambda ask: ask.at)))


def _too_late_to_renew(rng: random.Random, script: Script, chosen: Ask) -> Script:
    """Let a read end while an owner is stopped for longer than its grants run, and let old grants come once more."""
    tokens, lease_s = min(chosen.tokens, BLOCK), 8.0
    ask = replace(chosen, tokens=tokens, cached=0, fate=LENT, announce_s=0.0, routed_s=0.2, lease_s=lease_s, shares=-1)
    asks = tuple(ask if each is chosen else each for each in script.asks)
    owner, begin = rng.choice(script.prefill_names[ask.prefill]), ask.at + ask.lend_s + 0.3 + rng.random() * 0.6
    readers = tuple(name for engine in ask.engines for name in script.decode_names[engine])
    faults = (
        Fault("slow", ask.at, ask.lend_s + 1.0, readers),
        Fault("freeze", begin, rng.uniform(2.05, 2.6), (owner,)),
        Fault("duplicate", ask.at, ask.lend_s + 6.0, (owner,)),
        Fault("delay", begin, 4.0, (owner,), rng.choice([0.0, 0.5])),
    )
    return replace(script, asks=asks, faults=faults, seconds=max(script.seconds, begin + 5.0))


def _pressed(rng: random.Random, script: Script) -> Script:
    """Leave room for few, let some go first, and let engines try again by themselves."""
    asks, sleeps = [], any(fault.kind == "sleep" for fault in script.faults)
    for ask in script.asks:
        retried = bool(ask.retries) and rng.random() < 0.5
        late = rng.choice([0.0, rng.uniform(0.5, 4.0)]) if sleeps else 0.0
        asks.append(replace(ask, priority=rng.choice([0, 0, 0, -1, 1]), is_engine_retry=retried, lend_s=late))
    # Where one after the other takes too long for any deadline, no pull is made to wait.
    budget = rng.choice([0, 0, 1, 2]) if script.data < 100 else 0
    if budget and rng.random() < 0.5:
        asks = [replace(ask, at=asks[0].at + rng.random() * 0.1, lease_s=4.0) for ask in asks]
    return replace(script, asks=tuple(asks), budget=budget)


def _disordered(rng: random.Random, script: Script) -> Script:
    """Lend in any order, and some never: no scheduler knows which request ends first, or is aborted."""
    if rng.random() < 0.4:
        return script
    memory = rng.choice([0, 0, 0, 1, 1, 2])
    # Where little is remembered it has to be needed, and an engine without trouble sees most.
    odds = [LENT] * 8 + [ABORTED, WITHDRAWN]
    if memory:
        odds = [LENT] * 5 + [ABORTED] * 4 + [WITHDRAWN]
    elif script.spared:
        odds = [LENT] * 4 + [ABORTED] + [WITHDRAWN] * 3
    asks = []
    for ask in script.asks:
        late = rng.choice([0.0, 0.0, rng.uniform(0.0, 2.0)])
        routed_s = rng.choice([ask.routed_s, 6.0]) if memory else ask.routed_s
        asks.append(replace(ask, lend_s=ask.lend_s or late, fate=rng.choice(odds), routed_s=routed_s))
    return replace(script, asks=tuple(asks), schedulers=rng.choice([1, 1, 2]), memory=memory)


def _staged(rng: random.Random, script: Script) -> Script:
    """Give the decode engines of some scripts a second pipeline stage, which has its share of the trouble."""
    if rng.random() < 0.8:
        return script
    size, script = script.decode, replace(script, stages=2)
    twins = {n: names[i + size] for names in script.decode_names for i, n in enumerate(names[:size])}
    faults = [replace(f, who=tuple(twins.get(n, n) if rng.random() < 0.5 else n for n in f.who)) for f in script.faults]
    return replace(script, faults=tuple(faults))


def _without_agent(rng: random.Random, script: Script, names: Sequence[str]) -> Script:
    """Let the data plane of a rank die, which has trouble anyway if any rank has."""
    hit = [fault for fault in script.faults if not fault.who[0].isdecimal()]
    if rng.random() < 0.7:
        return script
    near = rng.choice(hit) if hit else Fault("", rng.choice(script.asks).at, 0.0, tuple(names))
    at, seconds = near.at + rng.random() ** 2, rng.choice([0.0, 0.05, 0.5, 1.5]) * rng.uniform(0.5, 1.5)
    fault = Fault("agent", min(at, script.seconds), seconds, (rng.choice(near.who),), rng.choice([0.3, 1.0, 1.0]))
    return replace(script, faults=(*script.faults, fault))


def _mild(rng: random.Random, script: Script, kinds: Sequence[str]) -> Script:
    """Let nothing happen to some services that a release does not survive: none of their leases may run out."""
    if rng.random() < 0.93 or len(kinds) < 2:
        return script
    names = [n for names in script.prefill_names + script.decode_names for n in names]
    # A rank with reads that failed for good is told once that they are over: that one message must arrive.
    apart = rng.choice(["fail", "loss"])
    kinds = [kind for kind in kinds if kind != apart]
    faults = [_draw(rng, rng.choice(kinds), names, script.asks, script.seconds) for _ in range(rng.randint(1, 3))]
    # Cancelled between two attempts, or just before the next; or the last words are lost.
    recipe = ("loss", "loss") if apart == "fail" else ("fail", "cancel", "cancel")
    faults += _cook(rng, recipe, names, script.asks, script.seconds) if set(recipe) <= set(kinds) else []
    faults = [replace(f, seconds=min(f.seconds, SHORT_LOSS_S)) if f.kind == "loss" else f for f in faults]
    asks = tuple(replace(ask, is_engine_retry=bool(ask.retries) and rng.random() < 0.7) for ask in script.asks)
    return replace(script, faults=tuple(faults), asks=asks)


def _hostile(rng: random.Random, script: Script) -> Script:
    """Leave some services alone with a hostile peer."""
    if rng.random() < 0.92:
        return script
    names = [n for names in script.prefill_names + script.decode_names for n in names]
    faults = [_draw(rng, "hostile", names, script.asks, script.seconds) for _ in range(rng.randint(1, 4))]
    return replace(script, faults=tuple(faults))


def _second_engine(rng: random.Random, script: Script, kinds: list[str]) -> Script:
    """Give some scripts a second prefill engine, and some of these one engine that has all the trouble."""
    if rng.random() < 0.6:
        return script
    asks = tuple(replace(ask, prefill=rng.randrange(2)) for ask in script.asks)
    script = replace(script, prefill_engines=2, asks=asks)
    troubled = rng.randrange(2)
    theirs = [ask for ask in asks if ask.prefill == troubled]
    if rng.random() < 0.4 or not theirs:
        return script
    # Alike but for their engine: the spared one is asked while the other is in trouble.
    asks = tuple(replace(a, lease_s=4.0, routed_s=0.2, at=rng.choice(theirs).at + rng.random()) for a in asks)
    names = list(script.prefill_names[troubled])
    theirs = [ask for ask in asks if ask.prefill == troubled]
    faults = [
        _draw(rng, rng.choice(kinds), names, theirs, script.seconds) for _ in range(rng.randint(1, 3) if kinds else 0)
    ]
    recipe = rng.choice(RECIPES)
    faults += _cook(rng, recipe, names, theirs, script.seconds) if set(recipe) <= set(kinds) else []
    return replace(script, asks=tuple(sorted(asks, key=lambda a: a.at)), faults=tuple(faults))


RECIPES = (
    ("slow", "delay", "loss"),
    ("slow", "pause"),
    ("slow", "pause"),
    ("slow", "partition"),
    ("slow", "freeze"),
    ("fail", "delay", "duplicate"),
    ("doubt", "delay", "loss"),
    ("doubt", "crash"),
    ("slow", "cancel", "delay"),
    ("slow", "revoke", "pause"),
    ("stuck", "delay"),
    ("stuck", "cancel", "close"),
    ("slow", "sleep"),
    ("slow", "drain", "loss"),
    ("doubt", "sleep"),
    ("fail", "cancel"),
    ("fail", "cancel"),
    ("slow", "cancel", "close"),
    ("duplicate", "delay", "loss"),
)
"""Faults that are worse together: on one rank, from one request on."""


def _cook(
    rng: random.Random, recipe: Sequence[str], names: list[str], asks: Sequence[Ask], seconds: float
) -> list[Fault]:
    ask, name = rng.choice(asks), rng.choice(names)
    out = []
    for kind in recipe:
        at = min(ask.at + rng.random() ** 2 * 1.0, seconds)
        target = str(ask.number) if kind in ("cancel", "revoke") else name
        p = rng.choice([0.02, 0.1, 0.2]) if kind == "pause" else rng.choice([0.3, 0.6, 1.0])
        out.append(Fault(kind, at, rng.uniform(0.5, 5.0), (target,), p))
    return out


def _draw(rng: random.Random, kind: str, names: list[str], asks: Sequence[Ask], seconds: float) -> Fault:
    # Most faults meet a request under way.
    at = rng.choice(asks).at + rng.random() ** 2 * 1.5 if rng.random() < 0.7 else rng.uniform(0.0, seconds)
    at, long = min(at, seconds), rng.choice([0.05, 0.5, 1.0, 3.0]) * rng.uniform(0.5, 1.5)
    targets: tuple[str, ...]
    if kind in ("cancel", "revoke"):
        chosen = rng.choice(asks)
        at, targets = min(chosen.at + rng.random() ** 3 * 2.0, seconds), (str(chosen.number),)
    elif kind == "partition":
        targets = tuple(rng.sample(names, rng.randint(1, max(len(names) - 1, 1))))
    elif kind in ("loss", "duplicate", "delay", "slow", "fail", "doubt", "stuck", "pause"):
        targets = tuple(rng.sample(names, rng.choice([1, len(names)]) if rng.random() < 0.5 else 1))
    else:
        targets = (rng.choice(names),)
    p = rng.choice([0.02, 0.1, 0.3, 1.0]) if kind != "pause" else rng.choice([0.001, 0.01, 0.05])
    return Fault(kind, at, long, targets, p)
