"""Write deploy/grafana/asynckv.json and the table in docs/metrics.md; a test compares.

The dashboard is defined here panel by panel, because Grafana's own format takes a hundred lines for each. Units are
Grafana's names for Prometheus' base units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asynckv.observe.metrics import FAMILIES
from scripts.draw.drawing import DOCS, between, table

DASHBOARD = DOCS.parent / "deploy" / "grafana" / "asynckv.json"
PAGE = DOCS / "metrics.md"

THESE = 'engine_id=~"$engine_id",rank=~"$rank"'
WIDTH, HEIGHT = 8, 8
"""Size of a panel in Grafana's grid of 24 columns."""


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        unit: Grafana's name: `s`, `bytes`, `Bps`, `short`, `percentunit`, `ops`.
        queries: PromQL by its legend; `THESE` selects the engines.
        says: Description of the panel.
        is_stacked: True if the series are parts of a whole.
    """

    title: str
    unit: str
    queries: Mapping[str, str]
    says: str = ""
    is_stacked: bool = False


def total(metric: str, by: str = "", but: str = "") -> str:
    """Return a rate per second over all selected engines, by some labels."""
    return f"sum{f' by ({by}) ' if by else ''}(rate(asynckv_{metric}{{{THESE}{but}}}[$__rate_interval]))"


def rate(metric: str, by: str = "", but: str = "") -> str:
    """Return a rate per second for each engine and each value of some labels."""
    return total(metric, ", ".join(filter(None, ("engine_id, rank", by))), but)


def quantile(metric: str, q: float, by: str = "", but: str = "") -> str:
    """Return a quantile of a histogram over all selected engines."""
    buckets = total(f"{metric}_bucket", ", ".join(filter(None, ("le", by))), but)
    return f"histogram_quantile({q:g}, {buckets})"


def gauge(metric: str, but: str = "") -> str:
    """Return a gauge of the selected engines."""
    return f"asynckv_{metric}{{{THESE}{but}}}"


def summed(metric: str, by: str) -> str:
    """Return the sum of a gauge over all selected engines, by a label."""
    return f"sum by ({by}) ({gauge(metric)})"


ENGINE = "{{engine_id}}/{{rank}}"

ROWS: Mapping[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel(
            "Pulls per second",
            "ops",
            {ENGINE: rate("pulls_ended_total")},
            "Attempts that ended, whether or not they succeeded.",
        ),
        Panel(
            "Failing pulls",
            "percentunit",
            {
                ENGINE: (
                    rate("pulls_ended_total", but=',reason!~"complete|cancelled"') + " / " + rate("pulls_ended_total")
                )
            },
            "The share of all attempts. A cancelled attempt does not count as failed.",
        ),
        Panel(
            "Duration of a pull",
            "s",
            {
                f"p{100 * q:g}": quantile("pull_duration_seconds", q, but=',outcome="complete"')
                for q in (0.5, 0.9, 0.99)
            },
            "The time from the call to the outcome of successful pulls.",
        ),
        Panel("Bytes per second", "Bps", {ENGINE: rate("read_bytes_total")}),
        Panel("Engines by state", "short", {"{{state}}": summed("engine_state", "state") + " > 0"}),
        Panel(
            "Blocks that are not free",
            "short",
            {"{{state}}": summed("blocks", "state")},
            "Quarantined and retired should be 0.",
            is_stacked=True,
        ),
    ),
    "The router": (
        Panel(
            "Requests by status",
            "ops",
            {"{{status}}": "sum by (status) (rate(pd_proxy_requests_total[$__rate_interval]))"},
            "A stream that ended in an error counts with that error's status. 499 means that the client left.",
            is_stacked=True,
        ),
        Panel(
            "Prompts that decode engines compute",
            "ops",
            {"{{cause}}": "sum by (cause) (rate(pd_proxy_decode_only_total[$__rate_interval])) > 0"},
        ),
        Panel("Requests under way", "short", {"{{instance}}": "pd_proxy_in_flight"}),
        Panel(
            "Time to the first event",
            "s",
            {
                f"p{100 * q:g}": (
                    f"histogram_quantile({q:g}, sum by (le) "
                    '(rate(pd_proxy_seconds_bucket{until="first"}[$__rate_interval])))'
                )
                for q in (0.5, 0.9, 0.99)
            },
            "The time to the first event of a stream.",
        ),
        Panel(
            "Engine faults",
            "ops",
            {"{{engine}} {{why}}": "sum by (engine, why) (rate(pd_proxy_engine_faults_total[$__rate_interval])) > 0"},
        ),
        Panel("Engines that are up", "short", {"{{role}} {{engine}}": "min by (role, engine) (pd_proxy_engine_up)"}),
    ),
    "Decode: pulls": (
        Panel("Pulls by state", "short", {"{{state}}": summed("pulls", "state")}, is_stacked=True),
        Panel("Ended, by reason", "ops", {"{{reason}}": total("pulls_ended_total", "reason") + " > 0"}),
        Panel(
            "Retried and rejected",
            "ops",
            {"retried: {{reason}}": total("pulls_retried_total", "reason"), "rejected": total("pulls_rejected_total")},
        ),
        Panel(
            "Phases, 90th percentile",
            "s",
            {"{{phase}}": quantile("pull_phase_seconds", 0.9, "phase")},
            "post and detect lie inside read; release runs in the background.",
        ),
        Panel(
            "Waiting",
            "short",
            {
                f"{ENGINE} waiting": gauge("pulls_waiting"),
                f"{ENGINE} queued": gauge("pulls_queued"),
                f"{ENGINE} admitted": gauge("pulls_admitted"),
                f"{ENGINE} retrying": gauge("pulls_retrying"),
            },
            "Queued pulls wait for the limits. Other waiting pulls wait for a handshake, or are not lent yet.",
        ),
        Panel(
            "Budgets in use",
            "percentunit",
            {
                f"{ENGINE} bytes": gauge("in_flight_bytes") + " / " + gauge("in_flight_limit_bytes"),
                f"{ENGINE} descriptors": gauge("in_flight_descriptors") + " / " + gauge("in_flight_descriptors_limit"),
                f"{ENGINE} requests": gauge("pulls_admitted") + " / " + gauge("pulls_admitted_limit"),
                f"{ENGINE} waiting": gauge("pulls_waiting") + " / " + gauge("pulls_waiting_limit"),
            },
        ),
        Panel("Oldest pull", "s", {ENGINE: gauge("pull_oldest_seconds")}),
        Panel(
            "Transfers",
            "ops",
            {"{{result}}": total("transfers_ended_total", "result"), "posted": total("transfers_posted_total")},
        ),
        Panel(
            "Transfers under way and in doubt",
            "short",
            {"{{state}}": summed("transfers", "state")},
            "A transfer in doubt has failed, but may still write.",
        ),
        Panel(
            "Merging",
            "short",
            {ENGINE: rate("descriptors_planned_total") + " / " + rate("descriptors_posted_total")},
            "Planned descriptors for each posted one.",
        ),
        Panel(
            "Follows",
            "ops",
            {
                "started": total("follows_started_total"),
                **{f"{x} {{{{reason}}}}": total(f"{x}_ended_total", "reason") + " > 0" for x in ("follows", "pieces")},
                f"{ENGINE} open": gauge("follows"),
            },
            "Requests that follow a ticket until their prompt is lent, and pieces of it that are read meanwhile.",
        ),
    ),
    "Prefill: leases": (
        Panel(
            "Lent and ended",
            "ops",
            {
                "lent": total("leases_lent_total"),
                "{{state}}": total("leases_ended_total", "state"),
                "withdrawn": total("requests_withdrawn_total"),
            },
            "Expired leases were not released in time.",
        ),
        Panel(
            "Leases by age",
            "short",
            {"{{state}}": summed("leases", "state"), "over {{seconds}} s": summed("leases_older_than", "seconds")},
        ),
        Panel("Oldest lease", "s", {ENGINE: gauge("lease_oldest_seconds")}),
        Panel(
            "Age of leases at their end",
            "s",
            {f"{{{{state}}}} p{100 * q:g}": quantile("lease_age_seconds", q, "state") for q in (0.5, 0.99)},
        ),
        Panel("Refusals", "ops", {"{{reason}}": total("refusals_total", "reason") + " > 0"}),
        Panel(
            "Parked claims",
            "short",
            {
                f"{ENGINE} parked": gauge("parked_messages"),
                f"{ENGINE} {{{{reason}}}} per second": rate("parked_messages_dropped_total", "reason"),
            },
            "Claims, releases and followers of requests that are not lent yet.",
        ),
        Panel(
            "Offers",
            "ops",
            {
                "refused: {{reason}}": total("offers_refused_total", "reason") + " > 0",
                **{x: total(f"{x}_total") for x in ("offers_made", "tickets_taken", "pieces_lent", "pieces_offered")},
                f"{ENGINE} followers": gauge("followers"),
                f"{ENGINE} tickets": gauge("tickets"),
            },
        ),
    ),
    "Peers and messages": (
        Panel("Peers by state", "short", {"{{state}}": summed("peers", "state")}, is_stacked=True),
        Panel(
            "Peers lost and silent",
            "ops",
            {"{{state}}": total("peer_changes_total", "state", ',state=~"gone|left|suspect|new"')},
        ),
        Panel("Bytes by peer", "Bps", {"{{peer}}": total("peer_read_bytes_total", "peer")}),
        Panel("Failures by peer", "ops", {"{{peer}}": total("peer_pulls_ended_total", "peer", ',outcome="failed"')}),
        Panel("Messages", "ops", {"{{direction}} {{type}}": total("messages_total", "direction, type")}),
        Panel(
            "Dropped and rejected",
            "ops",
            {
                "dropped: {{reason}}": total("messages_dropped_total", "reason") + " > 0",
                "rejected: {{cause}}": total("connections_rejected_total", "cause") + " > 0",
                "refused: {{cause}}": total("connections_refused_total", "cause") + " > 0",
            },
        ),
    ),
    "Engine health": (
        Panel(
            "Loop lag",
            "s",
            {f"p{100 * q:g}": quantile("loop_lag_seconds", q) for q in (0.5, 0.9, 0.99)},
            "Delay of the engine's timer, while the event loop does something else.",
        ),
        Panel(
            "Alarms in the last 5 minutes",
            "short",
            {
                f"{ENGINE} {name}": f"sum by (engine_id, rank) (increase(asynckv_{metric}{{{THESE}}}[5m])) > 0"
                for metric, name in (
                    ("loop_away_total", "loop away"),
                    ("internal_errors_total", "internal errors"),
                    ("observer_errors_total", "observer errors"),
                    ("log_events_lost_total", "log events lost"),
                    ("data_plane_losses_total", "data plane lost"),
                    ("data_plane_restarts_total", "data plane restarted"),
                    ("blocks_given_up_total", "blocks retired"),
                )
            },
        ),
        Panel(
            "Age of these figures, and of blocks in quarantine",
            "s",
            {
                f"{ENGINE} reading": gauge("reading_age_seconds"),
                f"{ENGINE} quarantine": gauge("quarantined_oldest_seconds"),
            },
        ),
    ),
    "Offload": (
        Panel(
            "Tokens looked up",
            "short",
            {f"{ENGINE} {{{{what}}}}": rate("offload_tokens_total", "what")},
            "Tokens of prompts that were found in host memory or files, were loaded from there, or turned out to "
            "be misses, because their blocks were given up meanwhile or could not be read.",
        ),
        Panel(
            "Moved",
            "Bps",
            {
                f"{ENGINE} {{{{move}}}}": rate("offload_bytes_moved_total", "move"),
                f"{ENGINE} {{{{move}}}}, blocks": rate("offload_blocks_moved_total", "move"),
            },
            "Moves between the accelerator, host memory and files.",
        ),
        Panel(
            "Kept and evicted",
            "short",
            {
                f"{ENGINE} {{{{tier}}}}, {{{{state}}}}": gauge("offload_blocks"),
                f"{ENGINE} to be written back": gauge("offload_waiting_blocks"),
                f"{ENGINE} {{{{tier}}}}, evicted per second": rate("offload_evicted_total", "tier"),
                f"{ENGINE} lost, {{{{reason}}}}": rate("offload_not_written_back_total", "reason"),
                f"{ENGINE} not stored, {{{{reason}}}}": rate("offload_not_stored_total", "reason"),
            },
            "Blocks in each tier. Blocks evicted before write-back are lost, because the disk is too slow. no_room "
            "means that all blocks were in use when others were to be stored: raise host_bytes.",
        ),
        Panel(
            "Fill level, and duration of calls",
            "short",
            {
                f"{ENGINE} {{{{tier}}}}, share of its bytes": gauge("offload_bytes")
                + " / "
                + gauge("offload_limit_bytes"),
                "{{call}} p99, seconds": quantile("offload_duration_seconds", 0.99, "call"),
            },
            "A load that waits for files takes as long as the files do.",
        ),
        Panel(
            "Results and failures",
            "ops",
            {
                f"{ENGINE} store {{{{outcome}}}}": rate("offload_stores_ended_total", "outcome"),
                f"{ENGINE} load {{{{outcome}}}}": rate("offload_loads_ended_total", "outcome"),
                f"{ENGINE} moves failed": rate("offload_moves_failed_total"),
                f"{ENGINE} records lost": rate("offload_records_lost_total"),
                f"{ENGINE} files lost: {{{{what}}}}": rate("offload_disk_failures_total", "what"),
                f"{ENGINE} {{{{tier}}}}: no {{{{what}}}}": f"{gauge('offload_up')} == 0",
            },
            "A record is lost if its bytes differ from those stored, after a torn write or on a bad disk.",
        ),
    ),
}


def dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
                "panels": [],
            }
        )
        y += 1
        for i, panel in enumerate(row):
            where = {"h": HEIGHT, "w": WIDTH, "x": i * WIDTH % 24, "y": y + i * WIDTH // 24 * HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, where))
        y += -(-len(row) * WIDTH // 24) * HEIGHT
    names = [
        ("engine_id", "Engine", "asynckv_engine_state"),
        ("rank", "Rank", 'asynckv_engine_state{engine_id=~"$engine_id"}'),
    ]
    variables: list[dict[str, Any]] = [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "hide": 0,
            "current": {},
        }
    ]
    variables += [
        {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "definition": f"label_values({of}, {name})",
            "query": {"query": f"label_values({of}, {name})", "refId": name},
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "refresh": 2,
            "sort": 1,
            "hide": 0,
        }
        for name, label, of in names
    ]
    return (
        json.dumps(
            {
                "uid": "asynckv",
                "title": "asynckv",
                "description": "KV cache on its way from prefill to decode workers.",
                "tags": ["asynckv"],
                "schemaVersion": 39,
                "version": 1,
                "editable": True,
                "graphTooltip": 1,
                "refresh": "30s",
                "time": {"from": "now-1h", "to": "now"},
                "timezone": "browser",
                "templating": {"list": variables},
                "annotations": {"list": []},
                "links": [],
                "panels": panels,
            },
            indent=1,
        )
        + "\n"
    )


SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, panel: Panel, where: dict[str, int]) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.is_stacked else {"fillOpacity": 5}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend, "range": True}
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield a row per metric, with its labels as Prometheus writes them."""
    for name, family in FAMILIES.items():
        shown = f"asynckv_{name}{'_total' if family.kind == 'counter' else ''}"
        labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
        yield f"`{shown}{labels}`", family.kind, family.help


def files() -> dict[Path, str]:
    """Return the dashboard and docs/metrics.md by path, made anew."""
    return {DASHBOARD: dashboard(), **between(PAGE, "metrics", table("| metric | type | meaning |", rows()))}
