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
ALERTS = re.findall(r"- alert: (\w+)", RULES_TEXT)
DASHBOARD: dict[str, Any] = json.loads(metrics.DASHBOARD.read_text())

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian and Ubuntu: apt-get install prometheus)"
)

HERE = 'engine_id="e",rank="tp0"'
ROUTER = 'job="pd_proxy",instance="r:80"'
ENGINE = 'job="asynckv",instance="e:9400"'
PROMPTS, COMPUTED = (f'vllm:asynckv_{name}_total{{job="vllm",engine="0",' for name in ("prompts", "computed_locally"))
LOST = 'role="decode",engine="http://d:8200"'
VLLM = {"job": "vllm", "engine": "0"}
MINUTE = "1m"

CASES: dict[str, tuple[dict[str, str], dict[str, str], float, dict[str, str]]] = {
    # alert: series that make it fire, series that do not, after how many minutes, its labels beyond the common ones
    "AsynckvEngineLost": (
        {
            'pd_proxy_engine_up{role="decode",engine="http://d:8200"}': "1x4 0x9",
            'pd_proxy_engine_up{role="decode",engine="http://new:8200"}': "0x9",  # it starts
            f"asynckv_readers_left_total{{{HERE}}}": "1x9",
        },
        {
            'pd_proxy_engine_up{role="decode",engine="http://d:8200"}': "1x4 0x9",
            f"asynckv_readers_left_total{{{HERE}}}": "0x4 1x9",
        },
        1.75,
        {"role": "decode", "engine": "http://d:8200"},
    ),
    "AsynckvEngineDown": (
        {'pd_proxy_engine_up{role="decode",engine="http://d:8200"}': "1 0x9"},
        {'pd_proxy_engine_up{role="decode",engine="http://d:8200"}': "1 1 0 1 1 1"},
        3,
        {"role": "decode", "engine": "http://d:8200"},
    ),
    "AsynckvRouterDown": (
        {f"up{{{ROUTER}}}": "1 0x9"},
        {f"up{{{ROUTER}}}": "1 0 1 0 1x9", 'up{job="other",instance="r:80"}': "0x15"},
        3,
        {"job": "pd_proxy", "instance": "r:80"},
    ),
    "AsynckvRouterErrors": (
        {
            f'pd_proxy_requests_total{{{ROUTER},path="/v1/completions",status="200"}}': "0+90x20",
            f'pd_proxy_requests_total{{{ROUTER},path="/v1/completions",status="502"}}': "0+5x20",
            f'pd_proxy_requests_total{{{ROUTER},path="/v1/responses",status="503"}}': "0+5x20",
        },
        {
            f'pd_proxy_requests_total{{{ROUTER},path="/v1/completions",status="200"}}': "0+90x20",
            f'pd_proxy_requests_total{{{ROUTER},path="/v1/completions",status="499"}}': "0+90x20",
            f'pd_proxy_requests_total{{{ROUTER},path="/v1/completions",status="503"}}': "0+5x20",
        },
        15,
        {"job": "pd_proxy", "instance": "r:80"},
    ),
    "AsynckvDecodeOnly": (
        {
            f'pd_proxy_decode_only_total{{{ROUTER},cause="transfer_failed"}}': "0+10x20",
            f'pd_proxy_decode_only_total{{{ROUTER},cause="no_params"}}': "0x20",
            f'pd_proxy_requests_total{{{ROUTER},path="/v1/completions",status="200"}}': "0+100x20",
        },
        {
            f'pd_proxy_decode_only_total{{{ROUTER},cause="transfer_failed"}}': "0+4x20",
            f'pd_proxy_decode_only_total{{{ROUTER},cause="prompts"}}': "0+50x20",
            f'pd_proxy_requests_total{{{ROUTER},path="/v1/completions",status="200"}}': "0+100x20",
        },
        15,
        {"job": "pd_proxy", "instance": "r:80", "cause": "transfer_failed"},
    ),
    "AsynckvPromptsWithoutParams": (
        {f'{PROMPTS}params="without_params"}}': "0 100 200x20", f'{PROMPTS}params="with_params"}}': "0x20"},
        {f'{PROMPTS}params="without_params"}}': "0+100x20", f'{PROMPTS}params="with_params"}}': "0+1x20"},
        5,
        VLLM,
    ),
    "AsynckvComputedLocally": (
        {
            f'{PROMPTS}params="with_params"}}': "0 30x20",  # and then silence
            f'{PROMPTS}params="without_params"}}': "0x20",
            f'{COMPUTED}cause="no_params"}}': "0 30x20",
        },
        {
            f'{PROMPTS}params="with_params"}}': "0+100x20",
            f'{COMPUTED}cause="malformed"}}': "0+4x20",
            f'{COMPUTED}cause="not_lent"}}': "0+50x20",
            f'{COMPUTED}cause="prompt_logprobs"}}': "0+50x20",
        },
        5,
        VLLM | {"cause": "no_params"},
    ),
    "AsynckvBlocksRetired": (
        {f'asynckv_blocks{{{HERE},state="retired"}}': "0 0 3x9"},
        {f'asynckv_blocks{{{HERE},state="retired"}}': "0x9", f'asynckv_blocks{{{HERE},state="quarantined"}}': "5x9"},
        5,
        {"state": "retired"},
    ),
    "AsynckvBlocksQuarantined": (
        {f"asynckv_quarantined_oldest_seconds{{{HERE}}}": "0+60x9"},
        {f"asynckv_quarantined_oldest_seconds{{{HERE}}}": "0 30 0 45 0 90 0 0 0 0"},
        5,
        {},
    ),
    "AsynckvLeasesExpiring": (
        {f'asynckv_leases_ended_total{{{HERE},state="expired"}}': "0+1x15"},
        {
            f'asynckv_leases_ended_total{{{HERE},state="expired"}}': "0 0 1 1 1 1 1 1 1 1 1 1 1 1 1",
            f'asynckv_leases_ended_total{{{HERE},state="released"}}': "0+1000x15",
        },
        11,
        {"state": "expired"},
    ),
    "AsynckvParamsGivenTwice": (
        {
            f'asynckv_refusals_total{{{HERE},reason="wrong_cohort"}}': "0 0 1x9",
            f'asynckv_refusals_total{{{HERE},reason="consumed"}}': "0 0 1x9",
        },
        {
            f'asynckv_refusals_total{{{HERE},reason="consumed"}}': "0 0 1x9",  # a retry of the router
            f'asynckv_refusals_total{{{HERE},reason="withdrawn"}}': "0+5x9",
        },
        4,
        {},
    ),
    "AsynckvLeaseHeldForLong": (
        {f"asynckv_lease_oldest_seconds{{{HERE}}}": "0+60x15"},
        {f"asynckv_lease_oldest_seconds{{{HERE}}}": "0+60x6 0+60x6"},
        10,
        {},
    ),
    "AsynckvPullsFailing": (
        {
            f'asynckv_pulls_ended_total{{{HERE},reason="timeout"}}': "0+10x20",
            f'asynckv_pulls_ended_total{{{HERE},reason="complete"}}': "0+100x20",
        },
        {
            f'asynckv_pulls_ended_total{{{HERE},reason="timeout"}}': "0+1x20",
            f'asynckv_pulls_ended_total{{{HERE},reason="cancelled"}}': "0+100x20",
            f'asynckv_pulls_ended_total{{{HERE},reason="complete"}}': "0+100x20",
        },
        15,
        {},
    ),
    "AsynckvQueueGrowing": (
        {f"asynckv_pulls_waiting{{{HERE}}}": "20+10x30"},
        {f"asynckv_pulls_waiting{{{HERE}}}": "400-10x30"},
        25,
        {},
    ),
    "AsynckvPullsRejected": (
        {f"asynckv_pulls_rejected_total{{{HERE}}}": "0 0 0 7x9"},
        {f"asynckv_pulls_rejected_total{{{HERE}}}": "7x15"},
        5,
        {},
    ),
    "AsynckvPeersGone": (
        {f'asynckv_peer_changes_total{{{HERE},state="gone"}}': "0 0 1x9"},
        {
            f'asynckv_peer_changes_total{{{HERE},state="gone"}}': "2x15",
            f'asynckv_peer_changes_total{{{HERE},state="left"}}': "0+1x15",
        },
        5,
        {"state": "gone"},
    ),
    "AsynckvLoopAway": (
        {f"asynckv_loop_away_total{{{HERE}}}": "0+1x15"},
        {
            f"asynckv_loop_away_total{{{HERE}}}": "0 0 1x15",
            f"asynckv_loop_lag_seconds_count{{{HERE}}}": "0+60x20",
            f'asynckv_loop_lag_seconds_bucket{{{HERE},le="10"}}': "0+60x20",
        },
        6,
        {},
    ),
    "AsynckvSchedulerStuck": (
        {f'asynckv_waits_for_step_seconds{{{HERE},what="result"}}': "0 0+60x9"},
        {
            f"asynckv_step_age_seconds{{{HERE}}}": "0+60x9",  # it is idle
            f"asynckv_pulls_started_total{{{HERE}}}": "7x9",
            f"asynckv_lease_unclaimed_seconds{{{HERE}}}": "0 9 0 9 0 9 0",
            f'asynckv_waits_for_step_seconds{{{HERE},what="claim"}}': "0 15 0 19 0 15 0",
            f'asynckv_waits_for_step_seconds{{{HERE},what="result"}}': "0x9",
        },
        5,
        {},
    ),
    "AsynckvLoopSilent": (
        {f"asynckv_reading_age_seconds{{{HERE}}}": "0 0+60x9"},
        {f"asynckv_reading_age_seconds{{{HERE}}}": "0 20 0 40 0 0 0 0 0 0"},
        5,
        {},
    ),
    "AsynckvDataPlaneDown": (
        {f"asynckv_data_plane_up{{{HERE}}}": "1 0x9"},
        {f"asynckv_data_plane_up{{{HERE}}}": "1x9"},
        4,
        {},
    ),
    "AsynckvDataPlaneRestarts": (
        {f"asynckv_data_plane_losses_total{{{HERE}}}": "0 1 1 2 2 3x15"},
        {f"asynckv_data_plane_losses_total{{{HERE}}}": "0 1x19"},
        15,
        {},
    ),
    "AsynckvInternalErrors": (
        {f"asynckv_internal_errors_total{{{HERE}}}": "0 0 1x9"},
        {f"asynckv_internal_errors_total{{{HERE}}}": "4x15"},
        5,
        {},
    ),
    "AsynckvLogEventsLost": (
        {f'asynckv_log_events_lost_total{{{HERE},reason="failed"}}': "0 0 1x9"},
        {f'asynckv_log_events_lost_total{{{HERE},reason="failed"}}': "4x15"},
        5,
        {"reason": "failed"},
    ),
    "AsynckvOffloadOff": (
        {
            f'asynckv_offload_up{{{HERE},what="writes",tier="file"}}': "1 1 0x9",
            f'asynckv_offload_up{{{HERE},what="reads",tier="file"}}': "1x9",
            f'asynckv_engine_state{{{HERE},state="running"}}': "1x9",
        },
        {
            f'asynckv_offload_up{{{HERE},what="writes",tier="host"}}': "0x9",
            f'asynckv_engine_state{{{HERE},state="running"}}': "0x9",  # it is suspended
        },
        5,
        {"what": "writes", "tier": "file"},
    ),
    "AsynckvOffloadFindsNothing": (
        {
            f'asynckv_offload_tokens_total{{{HERE},what="looked_up"}}': "0+1000x150",
            f'asynckv_offload_tokens_total{{{HERE},what="found"}}': "0+5x150",
        },
        {
            f'asynckv_offload_tokens_total{{{HERE},what="looked_up"}}': "0+1000x150",
            f'asynckv_offload_tokens_total{{{HERE},what="found"}}': "0+50x150",
        },
        125,
        {},
    ),
    "AsynckvOffloadNeverAsked": (
        {
            f"asynckv:kv_offload_stored_blocks_total{{{ENGINE}}}": "9x20",
            f"asynckv:kv_offload_asked_blocks_total{{{ENGINE}}}": "0x20",
        },
        {f"asynckv:kv_offload_stored_blocks_total{{{ENGINE}}}": "9x20"},  # of a version without the other
        15,
        {"job": "asynckv", "instance": "e:9400"},
    ),
    "AsynckvOffloadLoadsMiss": (
        {
            f'asynckv_offload_tokens_total{{{HERE},what="loaded"}}': "0+80x30",
            f'asynckv_offload_tokens_total{{{HERE},what="missed"}}': "0+20x30",
        },
        {
            f'asynckv_offload_tokens_total{{{HERE},what="loaded"}}': "0+95x30",
            f'asynckv_offload_tokens_total{{{HERE},what="missed"}}': "0+5x30",
        },
        20,
        {},
    ),
    "AsynckvOffloadNotWrittenBack": (
        {
            f'asynckv_offload_blocks_moved_total{{{HERE},move="store"}}': "0+100x30",
            f'asynckv_offload_not_written_back_total{{{HERE},reason="evicted"}}': "0+11x30",
            f'asynckv_offload_not_written_back_total{{{HERE},reason="no_room"}}': "0+9x30",
        },
        {
            f'asynckv_offload_blocks_moved_total{{{HERE},move="store"}}': "0+100x30",
            f'asynckv_offload_not_written_back_total{{{HERE},reason="evicted"}}': "0+5x30",
        },
        20,
        {},
    ),
    "AsynckvOffloadRecordsLost": (
        {f"asynckv_offload_records_lost_total{{{HERE}}}": "0 0 1x9"},
        {f"asynckv_offload_records_lost_total{{{HERE}}}": "4x15"},
        5,
        {},
    ),
    "AsynckvConnectionsRejected": (
        {f'asynckv_connections_rejected_total{{{HERE},cause="unlisted_key"}}': "0+5x15"},
        {
            f'asynckv_connections_rejected_total{{{HERE},cause="unlisted_key"}}': "0 1x15",
            f'asynckv_connections_rejected_total{{{HERE},cause="left"}}': "0+50x15",
        },
        11,
        {"cause": "unlisted_key"},
    ),
    "AsynckvNotAnswering": (
        {f"up{{{ENGINE}}}": "1 0x9", f"scrape_duration_seconds{{{ENGINE}}}": "0.01 3x9"},
        {f"up{{{ENGINE}}}": "1 0x9", f"scrape_duration_seconds{{{ENGINE}}}": "0.01x9"},  # it ended
        5,
        {"job": "asynckv", "instance": "e:9400"},
    ),
    "AsynckvProcessLost": (
        {f"up{{{ENGINE}}}": "1x4 0x9", f'asynckv_peer_changes_total{{{HERE},state="left"}}': "1x9"},
        {f"up{{{ENGINE}}}": "1x4 0x9", f'asynckv_peer_changes_total{{{HERE},state="left"}}': "1x4 2x9"},
        1.75,
        {"job": "asynckv", "instance": "e:9400"},
    ),
    "AsynckvNotScraped": (
        {f"up{{{ENGINE}}}": "1 0x9"},
        {f"up{{{ENGINE}}}": "1 0 1 0 1x9", 'up{job="other",instance="o:1"}': "0x15"},
        5,
        {"job": "asynckv", "instance": "e:9400"},
    ),
}

STOPPED_ONCE = {
    # For six minutes, in which it could not be scraped.
    f"asynckv_loop_away_total{{{HERE}}}": "0 0 _x6 1x20",
    f"asynckv_loop_lag_seconds_count{{{HERE}}}": "0+60x2 _x5 121+60x20",
    f'asynckv_loop_lag_seconds_bucket{{{HERE},le="10"}}': "0+60x2 _x5 120+60x20",
}


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
    cases = [*CASES.items(), ("AsynckvLoopAway", (STOPPED_ONCE, {}, 10, {}))]
    for alert, (bad, good, minutes, labels) in cases:
        severity = severity_of(alert)
        common = {} if {"job", "engine"} & labels.keys() else {"engine_id": "e", "rank": "tp0"}
        for series, expected in (
            (bad, [{"exp_labels": {**common, **labels, "severity": severity}, "exp_annotations": {}}]),
            (good, []),
        ):
            tests.append(
                {
                    "interval": MINUTE if minutes == int(minutes) else "15s",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "alert_rule_test": [
                        {"eval_time": f"{60 * minutes:.0f}s", "alertname": alert, "exp_alerts": expected}
                    ],
                }
            )
    # The words have numbers in them, which are not what is tested here.
    plain = re.sub(r"\n        annotations:\n(?:          .*\n?)+", "\n", RULES_TEXT)
    (tmp_path / "alerts.yml").write_text(plain)
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": tests}))
    promtool("test", "rules", str(path))


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
    plain = re.sub(r"\n        annotations:\n(?:          .*\n?)+", "\n", RULES_TEXT)
    (tmp_path / "alerts.yml").write_text(plain)
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
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": f"{evaluated}s", "tests": [test]}
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    promtool("test", "rules", str(tmp_path / "tests.yml"))


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
    (tmp_path / "alerts.yml").write_text(re.sub(r"\n        annotations:\n(?:          .*\n?)+", "\n", RULES_TEXT))
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
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "5s", "tests": cases}
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    promtool("test", "rules", str(tmp_path / "tests.yml"))


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
    (tmp_path / "alerts.yml").write_text(RULES_TEXT)
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "5s", "tests": [test]}
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    promtool("test", "rules", str(tmp_path / "tests.yml"))


# -- the dashboard -----------------------------------------------------------------------------------


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


@pytest.mark.anyio
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
