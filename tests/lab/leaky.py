"""Services in which some requests have mishaps and the others go well: scripts, drawn from seeds.

Several engines of one to four ranks each, and a dozen requests: the blocks of none to three come back late for a
reason that is written down (`tests.lab.mishaps`). In some, packets are lost for a moment or come twice as well,
which nothing has caused and which makes nothing late.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.lab.mishaps import MISHAPS, Mishap
from tests.lab.script import BLOCK, Ask, Fault, Script

SIZES = ((1, 1), (1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (2, 3), (4, 2), (2, 4), (4, 4), (1, 4), (4, 1), (3, 3))
"""Ranks of a prefill engine and of a decode engine."""

LEASE_S = 4.0
CUT_S = 7.0
"""Seconds for which readers are cut off that never meet their prefill engine."""


def make_leaky(seed: int) -> Script:
    """Draw a service, its requests and their mishaps from a seed."""
    rng = random.Random(repr(("leaky", seed)))
    prefill, decode = rng.choice(SIZES)
    prefill_engines, decode_engines = rng.choice([1, 1, 2]), rng.choice([1, 2, 2, 3])
    seconds, asks = rng.uniform(4.0, 8.0), []
    for number in range(rng.randint(6, 14)):
        engines: tuple[int, ...] = (rng.randrange(decode_engines),)
        if decode_engines > 1 and rng.random() < 0.15:
            engines = tuple(range(2))
        asks.append(
            Ask(
                number,
                rng.uniform(0.2, seconds * 0.8),
                rng.randint(1, 3 * BLOCK),
                rng.random() < 0.25,
                engines,
                -1,
                0 if rng.random() < 0.85 else rng.randint(0, BLOCK),
                rng.choice([0.0, 0.0, rng.uniform(0.01, 0.8)]),
                0,
                LEASE_S,
                0.2,
                prefill=rng.randrange(prefill_engines),
            )
        )
    asks.sort(key=lambda ask: ask.at)
    script = Script(
        seed,
        prefill,
        decode,
        decode_engines,
        12,
        tuple(asks),
        (),
        seconds,
        rng.choice([1.0, 1.0, 20.0]),
        rng.choice([1.0, 1.0, 30.0]),
        prefill_engines=prefill_engines,
    )
    befallen = rng.sample(asks, rng.choice([0, 1, 1, 2, 2, 3]))
    mishaps = tuple(_befall(rng, script, ask, rng.choice(list(MISHAPS))) for ask in befallen)
    names = sorted(n for engine in (*script.prefill_names, *_readers(script)) for n in engine)
    faults = []
    if rng.random() < 0.3:
        kind, seconds = rng.choice([("loss", 0.5), ("duplicate", 2.0)])
        faults.append(Fault(kind, rng.uniform(0.0, script.seconds), seconds, (rng.choice(names),), 0.5))
    return replace(script, mishaps=mishaps, faults=tuple(faults))


def _readers(script: Script) -> list[tuple[str, ...]]:
    """Names of the ranks of each decode engine."""
    return [tuple(f"d{e}.{r}" for r in range(script.decode)) for e in range(script.decode_engines)]


def _befall(rng: random.Random, script: Script, ask: Ask, kind: str) -> Mishap:
    """Draw the ranks that it befalls, and its seconds."""
    engines = [_readers(script)[e] for e in ask.engines]
    readers = [name for names in engines for name in names]
    if (r := rng.random()) < 0.4:
        readers = [rng.choice(readers)]
    elif r < 0.8:
        readers = list(rng.choice(engines))
    owners: tuple[str, ...] = ()
    seconds = rng.uniform(0.1, 2.0)
    match kind:
        case "late":
            seconds = LEASE_S + rng.uniform(1.0, 3.0)
        case "doubt":
            seconds = rng.uniform(1.0, 6.0)
        case "slow":
            seconds = rng.uniform(7.5, 12.0)
        case "unmet" | "keys_refused":
            seconds = ask.at + CUT_S
            if rng.random() < 0.3:
                owners = (rng.choice(script.prefill_names[ask.prefill]),)
        case "reader_away" | "owner_away":
            seconds = rng.uniform(LEASE_S + 1.5, LEASE_S + 3.0)
            owners = (rng.choice(script.prefill_names[ask.prefill]),) if kind == "owner_away" else ()
        case "owner_dies" | "release_lost" | "release_renamed":
            owners = (rng.choice(script.prefill_names[ask.prefill]),) if rng.random() < 0.5 else ()
        case _:
            pass
    return Mishap(kind, ask.number, tuple(readers), owners, seconds)
