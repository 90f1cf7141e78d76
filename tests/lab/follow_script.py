"""Scripts of services with requests that are followed, drawn from seeds.

Each is the script of the same seed in `tests.lab.script`, of which most requests have both legs sent at once. What goes
wrong with that is added. A service that only a hostile peer troubles, or of which an engine is spared, stays so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.lab.script import DROPPED, FAULTS, LENT, Ask, Fault, Legs, Script, make_script

MESSAGES = ("offer_loss", "offer_repeat", "offer_delay")
"""Faults of the messages about tickets alone, at the ranks that are named."""

FOLLOW_FAULTS = (*FAULTS, *MESSAGES, "abort", "cached")
"""Kinds of faults that a script with followed requests may hold. `abort` ends a request in its prefill engine; `cached`
says that its decode engines have found the whole prompt in their caches."""

TAKEN, FOLLOWED, LENDING, OFFERED, TOLD, ANNOUNCED, PULLED = (
    "when its prefill leg has come",
    "when a rank is asked for it",
    "when the first rank lends it",
    "when a rank offers it",
    "when a rank is offered it",
    "when a rank announces it",
    "when a rank pulls it",
)
MOMENTS = (TAKEN, FOLLOWED, LENDING, OFFERED, TOLD, ANNOUNCED, PULLED)
"""Moments of a fault of a request: it happens at the first such moment of any rank, or a little later."""

OWNER, READER = "owner", "reader"
"""The rank that a fault at a moment befalls: of the prefill engine, or of a decode engine."""

OF_RANKS = ("crash", "crash", "close", "sleep", "drain", "freeze")
OF_REQUESTS = ("cancel", "cancel", "abort", "cached")


def make_follow_script(seed: int, faults: Sequence[str] = FOLLOW_FAULTS) -> Script:
    """Draw a service with requests that are followed, and its faults, from a seed."""
    script = make_script(seed, [kind for kind in FAULTS if kind in faults])
    rng = random.Random(repr(("followed", seed)))
    share = rng.choice([0.6, 1.0, 1.0])
    is_quiet = not script.faults and rng.random() < 0.3
    is_alone = is_quiet or (bool(script.faults) and (script.is_only_hostile or bool(script.spared)))
    asks = [_followed(rng, script, ask, not is_alone) if rng.random() < share else ask for ask in script.asks]
    if not is_alone and len(asks) > 1 and rng.random() < 0.25:
        asks = _with_one_ticket(rng, asks)
        script = replace(script, schedulers=rng.choice([script.schedulers, 2, 2]))
    # The service is watched until most of them are done.
    ends = [ask.at + ask.legs.compute_s + ask.lend_s + 1.0 for ask in asks if ask.legs is not None]
    seconds = max(script.seconds, *ends) if ends else script.seconds
    script = replace(script, asks=tuple(asks), seconds=seconds)
    if is_alone or not (followed := [ask for ask in asks if ask.legs is not None]):
        return script
    added = [fault for _ in range(rng.choice([0, 1, 2, 3])) if (fault := _at_a_moment(rng, rng.choice(followed)))]
    added += [_of_messages(rng, script, rng.choice(followed)) for _ in range(rng.choice([0, 0, 1, 2]))]
    return replace(script, faults=(*script.faults, *(fault for fault in added if fault.kind in faults)))


def _followed(rng: random.Random, script: Script, ask: Ask, may_be_odd: bool) -> Ask:
    legs = Legs(
        ask.number,
        compute_s=rng.choice([0.0, rng.random() * 0.3, rng.random() * 2.0, rng.random() * 7.0]),
        late_s=rng.choice([0.0, 0.0, 0.0, rng.random() * 1.0, rng.random() * 9.0]),
        waits_s=rng.choice([0.0, 0.0, rng.random() * 0.5, rng.random() * 5.0]),
        again_s=rng.choice([-1.0, -1.0, -1.0, -1.0, 0.0, rng.random(), rng.random() * 6.0]),
        cached_s=rng.choice([-1.0] * 7 + [0.0, rng.random() ** 2 * 3.0]),
    )
    others = tuple(e for e in range(script.decode_engines) if e not in ask.engines)
    engines = tuple(e for e in range(script.prefill_engines) if e != ask.prefill)
    if may_be_odd and rng.random() < (0.6 if others else 0.3):
        odd = rng.choice(["lost", "stale", "stale"] + ["strangers"] * 3 * bool(others) + ["astray"] * 2 * bool(engines))
        legs = replace(
            legs,
            is_lost=odd == "lost",
            is_stale=odd == "stale",
            strangers=others if odd == "strangers" else (),
            astray=engines[0] if odd == "astray" else -1,
        )
    fate = DROPPED if ask.fate == LENT and rng.random() < 0.12 else ask.fate
    return replace(ask, legs=legs, fate=fate)


def _with_one_ticket(rng: random.Random, asks: Sequence[Ask]) -> list[Ask]:
    """Let two requests bear one ticket, often at the same time, and often to schedulers that do not know each other."""
    first = rng.choice(asks)
    others = [ask for ask in asks if ask is not first]
    second = rng.choice([ask for ask in others if (ask.number - first.number) % 2] or others)
    ticket = min(first.number, second.number)
    found = []
    for ask in asks:
        if ask in (first, second):
            legs = ask.legs or Legs(ask.number, rng.random())
            ask = replace(ask, prefill=first.prefill, legs=replace(legs, ticket=ticket))
            if ask is not first and rng.random() < 0.6:
                legs = replace(legs, ticket=ticket, compute_s=first.legs.compute_s if first.legs else 0.2)
                ask = replace(ask, at=first.at + rng.random() * 0.1, lend_s=first.lend_s, legs=legs)
        found.append(ask)
    return sorted(found, key=lambda ask: ask.at)


def _at_a_moment(rng: random.Random, ask: Ask) -> Fault:
    kind = rng.choice(OF_RANKS if rng.random() < 0.6 else OF_REQUESTS)
    who = (str(ask.number), rng.choice([OWNER, OWNER, READER])) if kind in OF_RANKS else (str(ask.number),)
    seconds = rng.choice([0.05, 0.5, 1.0, 3.0]) * rng.uniform(0.5, 1.5)
    return Fault(kind, max(ask.at - 0.01, 0.0), seconds, who, rng.choice([0.3, 1.0]), when=rng.choice(MOMENTS))


def _of_messages(rng: random.Random, script: Script, ask: Ask) -> Fault:
    names = [name for names in (*script.prefill_names, *script.decode_names) for name in names]
    who = tuple(rng.sample(names, rng.choice([1, len(names)])))
    at = max(ask.at - 0.1, 0.0) if rng.random() < 0.7 else rng.random() * script.seconds
    return Fault(rng.choice(MESSAGES), at, rng.choice([0.5, 3.0, 9.0]), who, rng.choice([0.2, 0.5, 1.0]))
