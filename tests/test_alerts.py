"""Alerts and the dashboard ask for metrics that exist, in Prometheus' own words; each alert fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asynckv.observe.metrics import FAMILIES
from scripts.draw import metrics
from tests.engines import Bench
from tests.observed import lived

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
ON_A_HOST = DEPLOY / "prometheus" / "prometheus.yml"
IN_CLUSTER = DEPLOY / "prometheus" / "kubernetes.yml"
RULES_TEXT = RULES.read_text()
WITHOUT_WORDS = re.sub(r"\n        annotations:\n(?:          .*\n?)+", "\n", RULES_TEXT)
"""The rules, without the words that have numbers in them."""
ALERTS = re.findall(r"- alert: (\w+)", RULES_TEXT)
DASHBOARD: dict[str, Any] = json.loads(metrics.DASHBOARD.read_text())

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian and Ubuntu: apt-get install prometheus)"
)

HERE = 'engine_id="e",rank="tp0"'
ROUTER = 'job="pd_proxy",instance="r:80"'
ENGINE = 'job="asynckv",instance="e:9400"'
OF_VLLM = 'job="vllm",engine="0"'
LOST = 'role="decode",engine="http://d:8200"'
VLLM = {"job": "vllm", "engine": "0"}
SCRAPED = {"job": "asynckv", "instance": "e:9400"}
MINUTE = "1m"


def series(name: str, common: str = "", **labels: str) -> str:
    said = [common] * bool(common) + [f'{label}="{value}"' for label, value in labels.items()]
    return f"{name}{{{','.join(said)}}}"


def ours(name: str, **labels: str) -> str:
    """Return the series of an engine."""
    return series(f"asynckv_{name}", HERE, **labels)


CASES: dict[str, tuple[float, dict[str, str], dict[str, tuple[str, str]]]] = {
    # alert: minutes until it fires, its labels beyond the common ones, and series: values that make it fire, and not
    "AsynckvEngineLost": (
        1.75,
        {"role": "decode", "engine": "http://d:8200"},
        {
            series("pd_proxy_engine_up", role="decode", engine="http://d:8200"): ("1x4 0x9", "1x4 0x9"),
            series("pd_proxy_engine_up", role="decode", engine="http://new:8200"): ("0x9", ""),  # it starts
            ours("readers_left_total"): ("1x9", "0x4 1x9"),
        },
    ),
    "AsynckvEngineDown": (
        3,
        {"role": "decode", "engine": "http://d:8200"},
        {series("pd_proxy_engine_up", role="decode", engine="http://d:8200"): ("1 0x9", "1 1 0 1 1 1")},
    ),
    "AsynckvRouterDown": (
        3,
        {"job": "pd_proxy", "instance": "r:80"},
        {series("up", ROUTER): ("1 0x9", "1 0 1 0 1x9"), series("up", job="other", instance="r:80"): ("", "0x15")},
    ),
    "AsynckvRouterErrors": (
        15,
        {"job": "pd_proxy", "instance": "r:80"},
        {
            series("pd_proxy_requests_total", ROUTER, path="/v1/completions", status="200"): ("0+90x20", "0+90x20"),
            series("pd_proxy_requests_total", ROUTER, path="/v1/completions", status="502"): ("0+5x20", ""),
            series("pd_proxy_requests_total", ROUTER, path="/v1/responses", status="503"): ("0+5x20", ""),
            series("pd_proxy_requests_total", ROUTER, path="/v1/completions", status="499"): ("", "0+90x20"),
            series("pd_proxy_requests_total", ROUTER, path="/v1/completions", status="503"): ("", "0+5x20"),
        },
    ),
    "AsynckvDecodeOnly": (
        15,
        {"job": "pd_proxy", "instance": "r:80", "cause": "transfer_failed"},
        {
            series("pd_proxy_decode_only_total", ROUTER, cause="transfer_failed"): ("0+10x20", "0+4x20"),
            series("pd_proxy_decode_only_total", ROUTER, cause="no_params"): ("0x20", ""),
            series("pd_proxy_requests_total", ROUTER, path="/v1/completions", status="200"): ("0+100x20", "0+100x20"),
            series("pd_proxy_decode_only_total", ROUTER, cause="prompts"): ("", "0+50x20"),
        },
    ),
    "AsynckvPromptsWithoutParams": (
        5,
        VLLM,
        {
            series("vllm:asynckv_prompts_total", OF_VLLM, params="without_params"): ("0 100 200x20", "0+100x20"),
            series("vllm:asynckv_prompts_total", OF_VLLM, params="with_params"): ("0x20", "0+1x20"),
        },
    ),
    "AsynckvComputedLocally": (
        5,
        VLLM | {"cause": "no_params"},
        {
            series("vllm:asynckv_prompts_total", OF_VLLM, params="with_params"): (
                "0 30x20",
                "0+100x20",
            ),  # and then silence
            series("vllm:asynckv_prompts_total", OF_VLLM, params="without_params"): ("0x20", ""),
            series("vllm:asynckv_computed_locally_total", OF_VLLM, cause="no_params"): ("0 30x20", ""),
            series("vllm:asynckv_computed_locally_total", OF_VLLM, cause="malformed"): ("", "0+4x20"),
            series("vllm:asynckv_computed_locally_total", OF_VLLM, cause="not_lent"): ("", "0+50x20"),
            series("vllm:asynckv_computed_locally_total", OF_VLLM, cause="prompt_logprobs"): ("", "0+50x20"),
        },
    ),
    "AsynckvBlocksRetired": (
        5,
        {"state": "retired"},
        {ours("blocks", state="retired"): ("0 0 3x9", "0x9"), ours("blocks", state="quarantined"): ("", "5x9")},
    ),
    "AsynckvBlocksQuarantined": (5, {}, {ours("quarantined_oldest_seconds"): ("0+60x9", "0 30 0 45 0 90 0 0 0 0")}),
    "AsynckvLeasesExpiring": (
        11,
        {"state": "expired"},
        {
            ours("leases_ended_total", state="expired"): ("0+1x15", "0 0 1 1 1 1 1 1 1 1 1 1 1 1 1"),
            ours("leases_ended_total", state="released"): ("", "0+1000x15"),
        },
    ),
    "AsynckvParamsGivenTwice": (
        4,
        {},
        {
            ours("refusals_total", reason="wrong_cohort"): ("0 0 1x9", ""),
            ours("refusals_total", reason="consumed"): ("0 0 1x9", "0 0 1x9"),  # alone, a retry of the router
            ours("refusals_total", reason="withdrawn"): ("", "0+5x9"),
        },
    ),
    "AsynckvLeaseHeldForLong": (10, {}, {ours("lease_oldest_seconds"): ("0+60x15", "0+60x6 0+60x6")}),
    "AsynckvPullsFailing": (
        15,
        {},
        {
            ours("pulls_ended_total", reason="timeout"): ("0+10x20", "0+1x20"),
            ours("pulls_ended_total", reason="complete"): ("0+100x20", "0+100x20"),
            ours("pulls_ended_total", reason="cancelled"): ("", "0+100x20"),
        },
    ),
    "AsynckvBytesDiffer": (
        5,
        {"reason": "differs"},
        {
            ours("pulls_ended_total", reason="differs"): ("0 0 1x9", "4x15"),
            ours("pulls_ended_total", reason="lease_lost"): ("", "0+1x15"),  # a recalled lease is no alert
            ours("leases_ended_total", state="revoked"): ("", "0+9x15"),
        },
    ),
    "AsynckvQueueGrowing": (25, {}, {ours("pulls_waiting"): ("20+10x30", "400-10x30")}),
    "AsynckvPullsRejected": (5, {}, {ours("pulls_rejected_total"): ("0 0 0 7x9", "7x15")}),
    "AsynckvPeersGone": (
        5,
        {"state": "gone"},
        {
            ours("peer_changes_total", state="gone"): ("0 0 1x9", "2x15"),
            ours("peer_changes_total", state="left"): ("", "0+1x15"),
        },
    ),
    "AsynckvLoopAway": (
        6,
        {},
        {
            ours("loop_away_total"): ("0+1x15", "0 0 1x15"),
            ours("loop_lag_seconds_count"): ("", "0+60x20"),
            ours("loop_lag_seconds_bucket", le="10"): ("", "0+60x20"),
        },
    ),
    "AsynckvSchedulerStuck": (
        5,
        {},
        {
            ours("waits_for_step_seconds", what="result"): ("0 0+60x9", "0x9"),
            ours("step_age_seconds"): ("", "0+60x9"),  # it is idle
            ours("pulls_started_total"): ("", "7x9"),
            ours("lease_unclaimed_seconds"): ("", "0 9 0 9 0 9 0"),
            ours("waits_for_step_seconds", what="claim"): ("", "0 15 0 19 0 15 0"),
        },
    ),
    "AsynckvLoopSilent": (5, {}, {ours("reading_age_seconds"): ("0 0+60x9", "0 20 0 40 0 0 0 0 0 0")}),
    "AsynckvDataPlaneDown": (4, {}, {ours("data_plane_up"): ("1 0x9", "1x9")}),
    "AsynckvDataPlaneRestarts": (15, {}, {ours("data_plane_losses_total"): ("0 1 1 2 2 3x15", "0 1x19")}),
    "AsynckvInternalErrors": (5, {}, {ours("internal_errors_total"): ("0 0 1x9", "4x15")}),
    "AsynckvLogEventsLost": (
        5,
        {"reason": "failed"},
        {ours("log_events_lost_total", reason="failed"): ("0 0 1x9", "4x15")},
    ),
    "AsynckvOffloadOff": (
        5,
        {"what": "writes", "tier": "file"},
        {
            ours("offload_up", what="writes", tier="file"): ("1 1 0x9", ""),
            ours("offload_up", what="reads", tier="file"): ("1x9", ""),
            ours("engine_state", state="running"): ("1x9", "0x9"),  # it is suspended
            ours("offload_up", what="writes", tier="host"): ("", "0x9"),
        },
    ),
    "AsynckvOffloadFindsNothing": (
        125,
        {},
        {
            ours("offload_tokens_total", what="looked_up"): ("0+1000x150", "0+1000x150"),
            ours("offload_tokens_total", what="found"): ("0+5x150", "0+50x150"),
        },
    ),
    "AsynckvOffloadNeverAsked": (
        15,
        SCRAPED,
        {
            series("asynckv:kv_offload_stored_blocks_total", ENGINE): ("9x20", "9x20"),
            series("asynckv:kv_offload_asked_blocks_total", ENGINE): ("0x20", ""),  # a version without it
        },
    ),
    "AsynckvOffloadLoadsMiss": (
        20,
        {},
        {
            ours("offload_tokens_total", what="loaded"): ("0+80x30", "0+95x30"),
            ours("offload_tokens_total", what="missed"): ("0+20x30", "0+5x30"),
        },
    ),
    "AsynckvOffloadNotWrittenBack": (
        20,
        {},
        {
            ours("offload_blocks_moved_total", move="store"): ("0+100x30", "0+100x30"),
            ours("offload_not_written_back_total", reason="evicted"): ("0+11x30", "0+5x30"),
            ours("offload_not_written_back_total", reason="no_room"): ("0+9x30", ""),
        },
    ),
    "AsynckvOffloadRecordsLost": (5, {}, {ours("offload_records_lost_total"): ("0 0 1x9", "4x15")}),
    "AsynckvConnectionsRejected": (
        11,
        {"cause": "unlisted_key"},
        {
            ours("connections_rejected_total", cause="unlisted_key"): ("0+5x15", "0 1x15"),
            ours("connections_rejected_total", cause="left"): ("", "0+50x15"),
        },
    ),
    "AsynckvNotAnswering": (
        5,
        SCRAPED,
        {
            series("up", ENGINE): ("1 0x9", "1 0x9"),
            series("scrape_duration_seconds", ENGINE): ("0.01 3x9", "0.01x9"),  # it ended
        },
    ),
    "AsynckvProcessLost": (
        1.75,
        SCRAPED,
        {series("up", ENGINE): ("1x4 0x9", "1x4 0x9"), ours("peer_changes_total", state="left"): ("1x9", "1x4 2x9")},
    ),
    "AsynckvNotScraped": (
        5,
        SCRAPED,
        {series("up", ENGINE): ("1 0x9", "1 0 1 0 1x9"), series("up", job="other", instance="o:1"): ("", "0x15")},
    ),
}

STOPPED_ONCE = {
    # For six minutes, in which it could not be scraped.
    ours("loop_away_total"): ("0 0 _x6 1x20", ""),
    ours("loop_lag_seconds_count"): ("0+60x2 _x5 121+60x20", ""),
    ours("loop_lag_seconds_bucket", le="10"): ("0+60x2 _x5 120+60x20", ""),
}


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def try_rules(folder: Path, interval: str, tests: list[dict[str, Any]], rules: str = WITHOUT_WORDS) -> None:
    """Evaluate rules at an interval against tests of promtool's form."""
    (folder / "alerts.yml").write_text(rules)
    whole = {"rule_files": ["alerts.yml"], "evaluation_interval": interval, "tests": tests}
    (folder / "tests.yml").write_text(json.dumps(whole))
    promtool("test", "rules", str(folder / "tests.yml"))


def severity_of(alert: str) -> str:
    (severity,) = re.findall(r"severity: (\w+)", rule(alert))
    return str(severity)


def rule(alert: str) -> str:
    return re.split(r"\n      - alert: ", RULES_TEXT.partition(f"- alert: {alert}\n")[2])[0]


@needs_promtool
def test_rules_and_configurations_are_as_prometheus_wants_them(tmp_path: Path) -> None:
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(ON_A_HOST))
    # Debian's promtool knows no discovery in Kubernetes (tests/test_deploy.py looks at that): addresses stand for it.
    text = re.sub("kubernetes_sd_configs: .*", "static_configs: [{targets: ['a:1']}]", IN_CLUSTER.read_text())
    (tmp_path / "alerts.yml").write_text(RULES_TEXT)
    (tmp_path / "prometheus.yml").write_text(text)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_every_alert_is_tried_and_has_a_runbook() -> None:
    assert list(CASES) == ALERTS
    page = metrics.PAGE.read_text()
    for alert in ALERTS:
        said = rule(alert)
        assert f"runbook_url: docs/metrics.md#{alert.lower()}\n" in said + "\n"
        assert f"\n### {alert}\n\n" in page
        assert re.search(r"severity: (warning|critical)", said)
        assert "summary: " in said
        assert "description: " in said
    assert re.findall(r"\n### (Asynckv\w+)\n", page) == ALERTS


@needs_promtool
@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_not_when_it_should_not(tmp_path: Path) -> None:
    tests = []
    cases = [*CASES.items(), ("AsynckvLoopAway", (10, {}, STOPPED_ONCE))]
    for alert, (minutes, labels, rows) in cases:
        severity = severity_of(alert)
        common = {} if {"job", "engine"} & labels.keys() else {"engine_id": "e", "rank": "tp0"}
        fires = [{"exp_labels": {**common, **labels, "severity": severity}, "exp_annotations": {}}]
        for column, expected in enumerate((fires, [])):
            tests.append(
                {
                    "interval": MINUTE if minutes == int(minutes) else "15s",
                    "input_series": [{"series": x, "values": both[column]} for x, both in rows.items() if both[column]],
                    "alert_rule_test": [
                        {"eval_time": f"{60 * minutes:.0f}s", "alertname": alert, "exp_alerts": expected}
                    ],
                }
            )
    try_rules(tmp_path, "15s", tests)


@needs_promtool
@pytest.mark.parametrize("path", [ON_A_HOST, IN_CLUSTER], ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("alert", "labels", "series", "within_s"),
    [
        # A scrape that fails is known when it has timed out.
        ("AsynckvNotAnswering", ENGINE, {"up": ("1", "0"), "scrape_duration_seconds": ("0.01", "3")}, 30),
        ("AsynckvLoopSilent", HERE, {"asynckv_reading_age_seconds": ("0", "{interval}+{interval}")}, 30),
        ("AsynckvEngineLost", f"{ROUTER},{LOST}", {"pd_proxy_engine_up": ("1", "0")}, 30),
        ("AsynckvProcessLost", ENGINE, {"up": ("1", "0")}, 30),
        ("AsynckvPeersGone", f'{HERE},state="gone"', {"asynckv_peer_changes_total": ("0", "1")}, 30),
        ("AsynckvSchedulerStuck", HERE, {'asynckv_waits_for_step_seconds{what="claim"}': ("0", "0+{interval}")}, 60),
        (
            "AsynckvSchedulerStuck",
            HERE,
            {
                "asynckv_step_age_seconds": ("0", "0+{interval}"),
                "asynckv_pulls_started_total": ("9", "9"),
                "asynckv_lease_unclaimed_seconds": ("0", "0+{interval}"),
            },
            60,
        ),
        ("AsynckvParamsGivenTwice", HERE, {'asynckv_refusals_total{reason="consumed"}': ("0", "1+1")}, 60),
    ],
)
def test_a_fault_is_reported_in_time(
    path: Path, alert: str, labels: str, series: dict[str, tuple[str, str]], within_s: int, tmp_path: Path
) -> None:
    """It happens just after the last scrape, and the rules are evaluated just before each scrape is known."""
    text = path.read_text()
    (evaluated,) = (int(each) for each in re.findall(r"\n  evaluation_interval: (\d+)s", text))
    job = text.partition("job_name: asynckv\n")[2].partition("job_name")[0]
    interval, timeout = (int(re.findall(rf"scrape_{name}: (\d+)s", job)[0]) for name in ("interval", "timeout"))
    assert evaluated == interval  # what promtool is told below
    known_late_by = (timeout if alert == "AsynckvNotAnswering" else 0) + evaluated
    expected = dict(each.split("=") for each in labels.replace('"', "").split(","))
    test = {
        "interval": f"{interval}s",
        "input_series": [
            {
                "series": f"{name.rstrip('}')}{',' if '{' in name else '{'}{labels}}}",
                "values": f"{well}x3 {ill.format(interval=interval)}x19",
            }
            for name, (well, ill) in series.items()
        ],
        "alert_rule_test": [
            {
                "eval_time": f"{3 * interval + within_s - known_late_by}s",
                "alertname": alert,
                "exp_alerts": [{"exp_labels": {**expected, "severity": severity_of(alert)}, "exp_annotations": {}}],
            }
        ],
    }
    try_rules(tmp_path, f"{evaluated}s", [test])


def test_ci_does_not_go_on_without_promtool(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "id"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    for tool in ("apt-get", "timeout"):  # nothing can be installed
        (tmp_path / tool).write_text(f"#!{shutil.which('bash')}\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    command = [str(tmp_path / "bash"), str(DEPLOY.parent / ".ci" / "run")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "promtool is missing, so the alerts cannot be tested: apt-get install prometheus" in done.stderr
    assert "venv" not in done.stderr, "before anything else was done"


@needs_promtool
def test_a_rolling_restart_in_order_fires_no_alert(tmp_path: Path) -> None:
    """Each of four engines is away for 25 s, one after the other. Its peers hear its goodbye, at the next scrape."""
    away, there = "0x4", 12  # scrapes at intervals of 5 s: five that fail; then it stays, and the next one goes
    series: dict[str, str] = {}
    for i in range(4):
        before, after = 4 + i * there, 4 + (4 - i) * there
        up = f"1x{before} {away} 1x{after}"
        name = f'engine_id="e{i}",rank="tp0"'
        series[f'up{{job="asynckv",instance="e{i}:9400"}}'] = up
        series[f'scrape_duration_seconds{{job="asynckv",instance="e{i}:9400"}}'] = f"0.01x{before + after + 5}"
        series[f'pd_proxy_engine_up{{{ROUTER},role="decode",engine="http://e{i}"}}'] = up
        heard = 4 + (i + 3) % 4 * there + 1  # of the one that went before
        series[f'asynckv_peer_changes_total{{state="left",{name}}}'] = f"0x{heard} 1x{before + after + 4 - heard}"
        series[f'asynckv_leases_ended_total{{state="released",{name}}}'] = f"0+100x{before} _x5 0+100x{after}"
        for counter in ('peer_changes_total{state="gone"', 'leases_ended_total{state="expired"'):
            series[f"asynckv_{counter},{name}}}"] = f"0x{before} _x5 0x{after}"
        series[f'asynckv_waits_for_step_seconds{{{name},what="result"}}'] = f"0x{before} _x5 0x{after}"
    none = [{"eval_time": f"{5 * t}s", "alertname": alert, "exp_alerts": []} for t in range(70) for alert in ALERTS]
    # The same without a goodbye, as after a kill: then the first one is reported before it is back.
    labels = {"job": "asynckv", "instance": "e0:9400", "severity": "critical"}
    lost = {
        "eval_time": "45s",
        "alertname": "AsynckvProcessLost",
        "exp_alerts": [{"exp_labels": labels, "exp_annotations": {}}],
    }
    silent = {name: values for name, values in series.items() if 'state="left"' not in name}
    cases = [
        {
            "interval": "5s",
            "input_series": [{"series": name, "values": values} for name, values in each.items()],
            "alert_rule_test": expected,
        }
        for each, expected in ((series, none), (silent, [lost]))
    ]
    try_rules(tmp_path, "5s", cases)


@needs_promtool
def test_counts_are_shown_as_whole_numbers(tmp_path: Path) -> None:
    """`increase` estimates, so that 3 events in 10 minutes are 3.05."""
    for alert in ALERTS:
        for how in re.findall(r"{{ \$value([^}]*)}}", rule(alert)):
            assert re.fullmatch(r' \| (humanizeDuration|humanizePercentage|printf "%\.0f") ', how), alert
    said = rule("AsynckvLeasesExpiring").split("\n")
    summary = next(x for x in said if "summary: " in x).partition(": ")[2].strip("'")
    annotations = {
        name: next(x for x in said if f" {name}: " in x).partition(": ")[2] for name in ("description", "runbook_url")
    }
    summary = summary.replace("{{ $labels.engine_id }}/{{ $labels.rank }}", "e/tp0")
    summary = summary.replace('{{ $value | printf "%.0f" }}', "3")
    labels = {"engine_id": "e", "rank": "tp0", "state": "expired", "severity": "warning"}
    expired = f'asynckv_leases_ended_total{{{HERE},state="expired"}}'
    test = {
        "interval": "7s",
        "input_series": [{"series": expired, "values": "0x60 1 2 3x60"}],
        "alert_rule_test": [
            {
                "eval_time": "12m",
                "alertname": "AsynckvLeasesExpiring",
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations | {"summary": summary}}],
            }
        ],
        # The estimate is no whole number.
        "promql_expr_test": [
            {
                "expr": f"increase({expired}[10m]) > bool 3.001",
                "eval_time": "12m",
                "exp_samples": [{"labels": f'{{{HERE},state="expired"}}', "value": 1}],
            }
        ],
    }
    try_rules(tmp_path, "5s", [test], RULES_TEXT)


# -- the dashboard -----------------------------------------------------------------------------------


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


async def test_rules_and_dashboard_ask_for_what_two_engines_show(sim: Bench) -> None:
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(await lived(sim)):
        for sample in family.samples:
            shown.setdefault(sample.name, {"job"}).update(sample.labels)  # Prometheus adds the job
    no_series = {"asynckv_connections_rejected_total", "asynckv_connections_refused_total"}  # these need keys
    no_series |= {
        f"asynckv_{name}{ {'counter': '_total', 'histogram': '_bucket'}.get(each.kind, '') }"
        for name, each in FAMILIES.items()
        if name.startswith("offload_")
    }
    for name in no_series:
        said = FAMILIES[re.sub("_(total|bucket)$", "", name.removeprefix("asynckv_"))]
        shown[name] = {"job", "engine_id", "rank", *said.labels} | ({"le"} if said.kind == "histogram" else set())
    exprs = [*queries(), *(rule(alert).partition("\n        labels:")[0] for alert in ALERTS)]
    exprs += [v["definition"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    asked: set[str] = set()
    for expr in exprs:
        for name, selector in re.findall(r"\b(asynckv_\w+)\b(?:\{([^}]*)\})?", expr):
            asked.add(name)
            assert name in shown, expr
            assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)", selector)) <= shown[name], expr
        for by in re.findall(r"by \(([^)]*)\)", expr):
            for label in by.split(", "):
                assert all(label in shown[name] for name in re.findall(r"\b(asynckv_\w+)\b", expr)), expr
    # And what is shown is looked at somewhere.
    bases = {re.sub(r"_(total|bucket|info)$", "", name.removeprefix("asynckv_")) for name in asked}
    assert {name.removesuffix("_info") for name in FAMILIES} - bases == {
        "engine",  # for joins
        "keys_overtaken",
        "late_releases",
        "packets",
        "parked_messages_limit",
        "pull_rereads",
        "second_look_bytes",  # 0 unless pulls look twice
        "second_looks_skipped",
    }


@needs_promtool
def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"q{i}", "expr": expr.replace("$__rate_interval", "1m").replace("$", "")}
        for i, expr in enumerate(queries())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_the_dashboard_is_well_formed() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        where = panel["gridPos"]
        assert 0 <= where["x"] <= where["x"] + where["w"] <= 24
        cells = {
            (x, y)
            for x in range(where["x"], where["x"] + where["w"])
            for y in range(where["y"], where["y"] + where["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time", "refresh"} <= DASHBOARD.keys()
