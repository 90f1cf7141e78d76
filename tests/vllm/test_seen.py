"""What engines inside vLLM show to Prometheus, and the spans that vLLM's own exporter sends of them.

vLLM's processes set OpenTelemetry up by themselves where `--otlp-traces-endpoint` is given. Its spans arrive here as at
any collector: over HTTP, in OTLP's protobuf.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import queue
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from scripts.bench.versus.vllm_side import free_port
from tests.commands import asynckv
from tests.vllm.engines import Server, continued, prompt
from tests.vllm.pairs import ASKED, Pair
from tests.vllm.setups import Connector, Setup
from tests.vllm.zoo import MODELS

TRACE = "0af7651916cd43dd8448eb211c80319c"
PREFILL, DECODE = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"
"""The router's spans of its questions to the two engines."""

WITHIN_S = 30.0


def headers(span: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{span}-01", "tracestate": "router=1"}


class Collector:
    """Takes spans, and hands them out in the sequence in which they came."""

    def __init__(self, url: str, came: queue.SimpleQueue[dict[str, Any]]) -> None:
        self.url, self._came = url, came

    def take(self, *names: str) -> list[dict[str, Any]]:
        """Wait for spans of these names, each as often as it is named."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + WITHIN_S
        while sorted(each["name"] for each in found) != sorted(names):
            try:
                span = self._came.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{names} were expected within {WITHIN_S:g} s; there are {found}") from None
            if span["name"].startswith("asynckv."):  # vLLM has some of its own
                found.append(span)
        return found


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Be a collector of OTLP over HTTP."""
    came: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {each.key: each.value.string_value for each in sent.resource.attributes}
                for span in (span for scope in sent.scope_spans for span in scope.spans):
                    came.put(
                        {
                            "name": span.name,
                            "trace": span.trace_id.hex(),
                            "span": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "state": span.trace_state,
                            "kind": resource.get("vllm.process_kind"),
                            "events": [event.name for event in span.events],
                            "attributes": {each.key: each.value for each in span.attributes},
                        }
                    )
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield Collector(f"http://127.0.0.1:{listening.server_port}/v1/traces", came)
        finally:
            listening.shutdown()
            thread.join()


def free_ports(count: int) -> int:
    """The first of ports that nobody has, one after the other."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = free_port()
            for more in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", first + more)))
            return first


def asked(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def shown(port: int, name: str, **labels: str) -> float:
    """The sum of what a rank shows of a metric, of the samples that have these labels."""
    families = text_string_to_metric_families(asked(port, "/metrics"))
    samples = [each for family in families for each in family.samples if each.name == f"asynckv_{name}"]
    found = [each.value for each in samples if labels.items() <= each.labels.items()]
    assert found, (name, labels, samples)
    return sum(found)


def test_each_worker_shows_its_metrics_and_writes_its_log(server: Server, tmp_path: Path) -> None:
    port, log = free_ports(3), {"file": str(tmp_path / "{engine_id}-{rank}.jsonl")}
    one = Setup("prefill", MODELS["dense"], Connector(extra={"metrics": {"port": port}, "log": log}))
    two = replace(one, connector=Connector(extra={"metrics": {"port": port + 1}, "log": log}), tp=2)
    pair = Pair.start(server, one, two)
    pair.generate(pair.prompt(100), pair.prompt(64))
    pair.settle()
    assert shown(port, "leases_lent_total", engine_id="prefill", rank="tp0") == 2
    assert shown(port, "leases_ended_total", state="released") == 2
    assert shown(port, "leases") == 0
    for rank in (0, 1):
        mine = port + 1 + rank
        assert asked(mine, "/healthz")
        assert asked(mine, "/readyz")
        assert shown(mine, "pulls_ended_total", engine_id="decode", rank=f"tp{rank}", reason="complete") == 2
        assert shown(mine, "peer_pulls_ended_total", peer="prefill") == 2
        assert shown(mine, "read_bytes_total") > 0
        assert shown(mine, "engine_state", state="running") == 1
    for engine in (pair.decode, pair.prefill):
        engine.ask("close")  # as vLLM ends its workers; a killed process loses the lines of its last half second
    logs = sorted(tmp_path.iterdir())
    assert [log.name for log in logs] == ["decode-tp0.jsonl", "decode-tp1.jsonl", "prefill-tp0.jsonl"]
    said = {log.name: [json.loads(line)["event"] for line in log.read_text().splitlines()] for log in logs}
    assert {events[0] for events in said.values()} == {"engine_started"}
    assert {events[-1] for events in said.values()} == {"engine_stopped"}
    assert said["prefill-tp0.jsonl"].count("lease_ended") == said["decode-tp1.jsonl"].count("pull_ended") == 2
    subprocess.run([sys.executable, "-m", "asynckv", "why", *map(str, logs)], check=True, timeout=60)


def why(*arguments: str | Path) -> dict[str, Any]:
    """What `asynckv why` finds, by code."""
    done = asynckv("why", *map(str, arguments), "--json", "-")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["findings"] else 0 if found["is_well"] else 3), done.stderr
    return {each["code"]: each for each in found["findings"]}


@pytest.mark.parametrize(
    ("params", "number", "code", "kind"),
    [(None, 200, "without_params", "prompts"), ({"do_remote_prefill": True}, 30, "no_params", "computed_locally")],
)
def test_an_engine_that_computes_all_prompts_by_itself_is_found_while_it_runs_and_by_its_log(
    server: Server, tmp_path: Path, params: Any, number: int, code: str, kind: str
) -> None:
    seen, log, port = tmp_path / "seen", tmp_path / "log.jsonl", free_ports(1)
    extra = {"inspect": {"directory": str(seen)}, "log": {"file": str(log)}, "metrics": {"port": port}}
    (engine,) = server.start(Setup("decode", MODELS["dense"], Connector(extra=extra)))
    began = time.monotonic()
    replies = [engine.add(f"r{i}", prompt(random.Random(i), 20), 2, params) for i in range(number)]
    engine.finish(*replies)
    ended = time.monotonic()
    while engine.ask("counted").get(kind) != {code: number}:  # and nothing more comes
        assert time.monotonic() - ended < 2.0, engine.ask("counted")
        engine.pause()
    while shown(port, f"{kind}_total") != number:
        assert time.monotonic() - ended < 2.0
        engine.pause()
    live = why(seen)
    assert list(live) == [code]
    assert f"{number} of {number} prompts itself (100.0%)" in live[code]["what"]
    engine.ask("close")
    logged = why(log)
    assert [each["what"] for each in logged.values()] == [live[code]["what"]]
    assert time.monotonic() - began < 60.0


def test_spans_are_below_what_asked_the_engine_for_them(server: Server) -> None:
    with collector() as collected:
        soon = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "50"}
        one = Setup("prefill", MODELS["dense"], traces=collected.url, environment=soon)
        pair = Pair.start(server, one, replace(one, tp=2))
        tokens = pair.prompt(100)

        def generate(trace: dict[str, str] | None) -> None:
            prefilled = pair.prefill.add(pair.name("p"), tokens, 1, ASKED, trace=headers(PREFILL))
            pair.prefill.finish(prefilled)
            assert prefilled.params is not None
            reply = pair.decode.add(pair.name("d"), tokens, 6, prefilled.params, trace=trace)
            pair.decode.finish(reply)
            assert reply.tokens == continued(tokens, 6)

        # A router that passes the trace to both engines, and one that passes it to the first alone.
        for trace, above in ((headers(DECODE), DECODE), (None, PREFILL)):
            generate(trace)
            pulls = "asynckv.pull", "asynckv.pull"
            spans = collected.take("asynckv.lease", *pulls, "asynckv.release", "asynckv.release")
            by_name = {name: [s for s in spans if s["name"] == f"asynckv.{name}"] for name in ("lease", "pull")}
            assert {each["trace"] for each in spans} == {TRACE}
            assert [each["parent"] for each in by_name["lease"]] == [PREFILL]
            assert [each["parent"] for each in by_name["pull"]] == [above] * 2
            pulled = {each["span"] for each in by_name["pull"]}
            assert {each["parent"] for each in spans if each["name"] == "asynckv.release"} == pulled
            assert {each["state"] for each in by_name["pull"]} == {"router=1"}
            assert by_name["lease"][0]["events"][0] == "lent"
            assert {each["events"][-1] for each in by_name["pull"]} == {"proven"}
            assert sum(each["attributes"]["asynckv.bytes"].int_value for each in by_name["pull"]) > 0
            # Or the second would find all in its prefix cache.
            assert pair.decode.ask("forget_prefixes")
        pair.prefill.finish(pair.prefill.add("untraced", tokens, 1))
        pair.settle()
