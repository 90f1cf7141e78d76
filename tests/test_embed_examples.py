"""The examples run as they are, with real processes; those of the three ways are as short as they are said to be."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asynckv import Cancel, Failed, Finished, LeaseEnd, PrefillRanks, Pull, PullError, PullResult, Withdraw
from tests.commands import python

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
WAYS = ("native", "threaded")
MOST_LINES = 40


def run(*words: str, timeout_s: float = 50) -> subprocess.CompletedProcess[str]:
    return python(*words, timeout_s=timeout_s, PYTHONPATH=str(EXAMPLES.parents[1]))


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_example_runs(way: str) -> None:
    done = run(str(EXAMPLES / f"{way}.py"))
    assert (done.returncode, done.stdout) == (0, "393216 bytes, released\n"), done.stderr


@pytest.mark.nixl
@pytest.mark.slow
def test_the_example_of_a_trace_prints_one() -> None:
    done = run(str(EXAMPLES / "traced.py"))
    spans = [line.split()[:2] for line in done.stdout.splitlines()]
    assert sorted(name for _, name in spans) == ["asynckv.lease", "asynckv.pull", "asynckv.release", "request"]
    assert (done.returncode, len({trace for trace, _ in spans})) == (0, 1), done.stderr


@pytest.mark.nixl
@pytest.mark.slow
def test_the_example_of_an_offload_runs() -> None:
    done = run(str(EXAMPLES / "offload.py"))
    assert (done.returncode, done.stdout) == (0, "393216 bytes, 48 tokens\n"), done.stderr


@pytest.mark.nixl
@pytest.mark.slow
def test_the_example_of_a_head_start_reads_most_of_a_prompt_before_its_end() -> None:
    done = run(str(EXAMPLES / "ahead.py"))
    early, late = map(int, re.findall(r"(\d+) bytes", done.stdout))
    assert (done.returncode, early + late, done.stdout[-10:]) == (0, 512 * 8192, " released\n"), done.stderr
    assert early > late


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_two_engines_run_and_leave_nothing_behind(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "two_engines" / "run.py"), str(tmp_path), timeout_s=100)
    assert (done.returncode, done.stderr) == (0, "")
    prefill, decode, r1, r2, r3, end = done.stdout.splitlines()
    assert "tensor parallel 2" in prefill
    assert "tensor parallel 1" in decode
    assert r1 == "r1: 393,216 bytes of KV came from the prefill engine; they are right: True"
    assert r2.startswith("r2: aborted; the prefill engine has its blocks back after ")
    assert r3 == "r3: the pull failed (LeaseRefused: revoked); computed here; it is right: True"
    assert end == "all blocks are free in both engines"
    told = run("-m", "asynckv", "why", str(tmp_path))
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_example_on_simulated_planes_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "simulated.py"), run_name="__main__")
    assert capsys.readouterr().out == "held after PullTimeout, and returned\n"


class Workers:
    """Workers of an engine, with the news for its scheduler, step by step."""

    def __init__(self, size: int) -> None:
        self.endpoints = [
            {"tp_rank": i, "address": f"tcp://127.0.0.1:{i + 1}", "incarnation": "a"} for i in range(size)
        ]
        self.told: list[Any] = [Finished() for _ in range(size)]
        self.orders: list[Any] = []
        self.num_computed = 0
        self.starting: set[int] = set()
        self.takes = 0
        """Steps for which a restart goes on."""

    @property
    def is_whole(self) -> bool:
        return not self.starting

    def step(self, orders: list[Any], compute: Any = (), check: Any = ()) -> dict[int, Any]:
        told, self.told = self.told, [Finished() for _ in self.told]
        self.orders, self.num_computed = orders, self.num_computed + len(compute)
        reports = {rank: each for rank, each in enumerate(told) if rank not in self.starting}
        return {rank: each if each is None else (each, [True] * len(check)) for rank, each in reports.items()}

    def restart(self, tp_rank: int) -> None:
        self.starting.add(tp_rank)

    def started(self) -> list[int]:
        self.takes -= 1
        ready, self.starting = (sorted(self.starting), set()) if self.takes < 0 else ([], self.starting)
        for tp_rank in ready:
            self.endpoints[tp_rank] = self.endpoints[tp_rank] | {"incarnation": "b"}
        return ready


@pytest.fixture
def two_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the example's modules, as `python docs/examples/two_engines/run.py` does."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "two_engines"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == EXAMPLES / "two_engines":
            del sys.modules[name]


PROMPT = list(range(40))
GROUP = PrefillRanks("prefill", [{"tp_rank": 0, "address": "tcp://127.0.0.1:1", "incarnation": "a"}])
HASHES: dict[str, Any] = {"hashes": ["h"], "hash_tokens": 40}
PARAMS = GROUP.make_params("r1", [(0, [1, 2, 3])], 40, **HASHES)
DONE = PullResult("r1", "p", 1, 1, 1, 1, {}, (), 40)


def failure(held: dict[int, tuple[int, ...]], failed_in: str = "read") -> Failed:
    return Failed("r1", PullError("it broke", request_id="r1", reason="lost", held=held, failed_in=failed_in))


def pulling(two_engines: Any, size: int) -> tuple[Any, Any, Workers, list[int]]:
    """A decode engine in the middle of a pull; and the blocks of it."""
    workers = Workers(size)
    scheduler = two_engines("decode").Scheduler(workers)
    call = two_engines("scenery").Call("/decode", {"request_id": "r1", "prompt": PROMPT, "params": PARAMS})
    scheduler.take(call)
    scheduler.step()
    (pull,) = [order for order in workers.orders if isinstance(order, Pull)]
    return scheduler, call, workers, [block for block in pull.groups[0][1] if block is not None]


def test_the_decode_example_keeps_blocks_that_are_held_until_every_rank_has_returned_them(two_engines: Any) -> None:
    scheduler, call, workers, blocks = pulling(two_engines, 2)
    workers.told[1].failed = [failure({0: tuple(blocks)})]
    scheduler.step()
    assert not call.answer.done(), "rank 0 has not said how its pull ended"
    workers.told[0].finished_recving = [DONE]
    scheduler.step()
    assert not set(blocks) & set(scheduler.free)
    scheduler.step()
    assert workers.num_computed == 1
    assert call.answer.result()["from"] == "here"
    assert not set(blocks) & set(scheduler.free), "nobody has returned them"
    workers.told[1].returned = ["r1"]
    scheduler.step()
    assert sorted(scheduler.free) == list(range(64))
    assert len(scheduler.ledger) == 0


def test_the_decode_example_computes_a_prompt_that_is_not_the_one_that_was_lent(two_engines: Any) -> None:
    scheduler, call, workers, _ = pulling(two_engines, 1)
    workers.told[0].finished_recving = [PullResult("r1", "p", 1, 1, 1, 1, {}, (), 32)]
    scheduler.step()
    scheduler.step()
    assert call.answer.result()["why"] == "only 32 tokens are those that were lent"
    assert sorted(scheduler.free) == list(range(64))


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_the_decode_example_aborts(two_engines: Any, ends: str) -> None:
    scheduler, call, workers, _ = pulling(two_engines, 1)
    scheduler.take(two_engines("scenery").Call("/abort", {"request_id": "r1"}))
    if ends == "well":
        workers.told[0].finished_recving = [DONE]
    else:
        workers.told[0].failed = [failure({})]
    scheduler.step()
    assert workers.orders == [Cancel("r1")]
    assert call.answer.result()["why"] == "aborted"
    assert sorted(scheduler.free) == list(range(64))


def test_the_decode_example_refuses_an_id_that_is_under_way(two_engines: Any) -> None:
    scheduler, _, _, _ = pulling(two_engines, 1)
    scheduler.take(
        again := two_engines("scenery").Call("/decode", {"request_id": "r1", "prompt": PROMPT, "params": {}})
    )
    assert again.answer.result() == {"error": "'r1' is under way"}


def test_the_prefill_example_aborts_what_waits(two_engines: Any) -> None:
    scheduler = two_engines("prefill").Scheduler(workers := Workers(2))
    scheduler.take(call := two_engines("scenery").Call("/prefill", {"request_id": "r1", "prompt": PROMPT}))
    scheduler.take(two_engines("scenery").Call("/abort", {"request_id": "r1"}))
    scheduler.step()
    assert call.answer.result() == {"error": "aborted"}
    assert (workers.num_computed, sorted(scheduler.free)) == (0, list(range(64)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/prefill", {}),
        ("/prefill", []),
        ("/prefill", {"request_id": "r", "prompt": "abc"}),
        ("/prefill", {"request_id": "r", "prompt": [1] * 1025}),
        ("/prefill", {"request_id": 1, "prompt": [1]}),
        ("/decode", {"request_id": "r", "prompt": [1]}),
        ("/decode", {"request_id": "r", "prompt": [1], "params": "p"}),
        ("/abort", {}),
    ],
)
def test_the_examples_take_no_call_that_ends_them(two_engines: Any, path: str, body: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        two_engines("scenery").check(path, body)


def test_the_prefill_example_goes_on_when_a_rank_has_died(two_engines: Any) -> None:
    workers = Workers(2)
    scheduler = two_engines("prefill").Scheduler(workers)
    first, second = (
        two_engines("scenery").Call("/prefill", {"request_id": name, "prompt": PROMPT}) for name in ("r1", "r2")
    )
    scheduler.take(first)
    scheduler.step()
    params = first.answer.result()["params"]
    scheduler.take(second)
    workers.told[1] = None
    scheduler.step()
    assert not second.answer.done(), "a rank's part of its KV is lost"
    assert len(scheduler.free) == 61, "rank 0 may still be read"
    scheduler.step()
    assert workers.orders == [Withdraw(params)]
    assert second.answer.result()["params"]["endpoints"] != params["endpoints"]
    workers.told[0].finished_sending = [LeaseEnd("r1", "revoked", {}, (), 0.1)]
    scheduler.step()
    assert len(scheduler.free) == 61, "r2 has three blocks"
    assert (len(scheduler.ledger), scheduler.ledger.get("r1")) == (1, None)


def test_the_engines_go_on_while_a_rank_is_started_again(two_engines: Any) -> None:
    """A start takes minutes with a model: aborts are heard meanwhile, and what a new rank has to hear is kept."""
    call = two_engines("scenery").Call
    for name, path in (("prefill", "/prefill"), ("decode", "/decode")):
        scheduler = two_engines(name).Scheduler(workers := Workers(1))
        scheduler.take(first := call(path, {"request_id": "r1", "prompt": PROMPT, "params": PARAMS}))
        scheduler.step()
        workers.told[0] = None
        workers.takes = 3
        scheduler.step()
        second, third = (
            call(
                path,
                {"request_id": x, "prompt": PROMPT, "params": GROUP.make_params(x, [(0, [4, 5, 6])], 40, **HASHES)},
            )
            for x in ("r2", "r3")
        )
        scheduler.take(second)
        scheduler.take(third)
        scheduler.take(call("/abort", {"request_id": "r2"}))
        scheduler.step()
        assert second.answer.done(), name
        assert not third.answer.done()
        assert (workers.is_whole, list(workers.orders)) == (False, [])
        scheduler.take(status := call("/status", {}))
        assert status.answer.result() == {"free_blocks": 64}
        for _ in range(6):
            scheduler.step()
        assert workers.is_whole
        if name == "prefill":
            assert third.answer.result()["params"]["endpoints"][0]["incarnation"] == "b"
        else:
            assert first.answer.result()["from"] == "here"
            assert scheduler.ledger.get("r3") is not None, "it is pulled"


def test_a_rank_that_is_started_again_is_asked_when_it_is_ready(two_engines: Any) -> None:
    """No worker is real here, only the pipes."""
    ends: list[Any] = []
    base: Any = two_engines("scenery").Ranks

    class Ranks(base):  # type: ignore[misc]
        def _start(self, tp_rank: int) -> Any:
            ours, theirs = multiprocessing.Pipe()
            ends.append(theirs)
            if len(ends) <= 2:
                theirs.send(f"endpoint {len(ends)}")
            return types.SimpleNamespace(kill=lambda: None, join=lambda timeout=None: None), ours

    ranks = Ranks(None, "e", 2, "")
    assert (ranks.is_whole, ranks.endpoints) == (True, ["endpoint 1", "endpoint 2"])
    ranks.restart(0)
    assert (ranks.is_whole, ranks.started()) == (False, [])
    ends[1].send((Finished(), []))
    assert list(ranks.step([])) == [1], "the other one is asked, and nothing waits for this one"
    ends[2].close()  # it dies while it starts, and is started once more
    assert (ranks.started(), ranks.started(), len(ends)) == ([], [], 4)
    ends[3].send("endpoint 4")
    assert (ranks.started(), ranks.started(), ranks.is_whole, ranks.endpoints[0]) == ([0], [], True, "endpoint 4")


def test_the_decode_example_goes_on_when_a_rank_has_died(two_engines: Any) -> None:
    scheduler, call, workers, blocks = pulling(two_engines, 2)
    workers.told[0] = None
    scheduler.step()
    assert not set(blocks) & set(scheduler.free), "rank 1 still pulls into them"
    workers.told[1].failed = [failure({0: tuple(blocks)})]
    scheduler.step()
    assert workers.orders == [Cancel("r1")]
    scheduler.step()
    assert call.answer.result() == {"from": "here", "num_bytes": 0, "why": "PeerLost: rank_died", "is_right": True}
    assert not set(blocks) & set(scheduler.free), "rank 1 has not returned them"
    workers.told[1].returned = ["r1"]
    scheduler.step()
    assert sorted(scheduler.free) == list(range(64))


def test_the_decode_example_computes_again_what_a_rank_had_when_it_died(two_engines: Any) -> None:
    scheduler, call, workers, _ = pulling(two_engines, 2)
    workers.told[0].finished_recving = [DONE]
    scheduler.step()
    workers.told[0], workers.told[1].finished_recving = None, [DONE]
    scheduler.step()
    assert not call.answer.done()
    scheduler.step()
    assert call.answer.result()["from"] == "here"
    assert workers.num_computed == 1
    assert sorted(scheduler.free) == list(range(64))


@pytest.mark.parametrize("way", [*WAYS, "offload"])
def test_an_example_is_short(way: str) -> None:
    assert len((EXAMPLES / f"{way}.py").read_text().splitlines()) <= MOST_LINES
