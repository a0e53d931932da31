"""Writes the Grafana board: ``python -m tools.grafana_board``. A test checks that the file is up to date.

Every expression selects by the board's variables (``SELECT``). Panels show sums over what is selected; database series
are equal on servers that share one, so these are maxima.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

BOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "neaptide.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ACROSS, WIDTH, HEIGHT = 3, 8, 8
STAT_WIDTH, STAT_HEIGHT = 4, 4
SELECT = 'job=~"$job",instance=~"$instance"'
OF_A_REPLICA = 'replica=~"$replica"'
RED, ORANGE, GREEN, BLUE = "red", "orange", "green", "blue"
Query = tuple[str, str]
"""Legend of a line, and its expression; ``@`` stands for the selector."""
Steps = tuple[tuple[str, float | None], ...]
"""Colours from values on; the first has None."""
PLAIN: Steps = ((BLUE, None),)
SHARE_MET: Steps = ((RED, None), (ORANGE, 0.95), (GREEN, 0.99))


class Panel(NamedTuple):
    title: str
    unit: str
    description: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    is_stacked: bool = False
    most: float | None = None
    """Top of the axis; None follows the data."""
    steps: Steps = ()
    """Thresholds; drawn as lines in a time series."""
    empty: str = "no data"


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]
    is_collapsed: bool = False
    """Whether it is folded: a row that most servers have no data for."""


def met(by: str, window: str) -> str:
    """Share of targets met."""
    attained = f"sum by ({by}) (rate(neaptide_slo_attained_total{{@}}[{window}]))"
    return f"{attained} / ({attained} + sum by ({by}) (rate(neaptide_slo_violated_total{{@}}[{window}])))"


def latency(name: str) -> tuple[Query, ...]:
    """Quantiles by tier, with the target as a line."""
    quantiles = tuple(
        (
            f"{{{{tier}}}} p{q}",
            f"histogram_quantile(0.{q}, sum by (tier, le) (rate(neaptide_request_{name}_seconds_bucket{{@}}[5m])))",
        )
        for q in (50, 99)
    )
    return (*quantiles, ("target", f'max(neaptide_target_seconds{{@,slo="{name}"}})'))


def p99(name: str) -> tuple[Query, ...]:
    """The p99 of all tiers over the target."""
    buckets = f"sum by (le) (rate(neaptide_request_{name}_seconds_bucket{{@}}[5m]))"
    return (("p99", f'histogram_quantile(0.99, {buckets}) / scalar(max(neaptide_target_seconds{{@,slo="{name}"}}))'),)


LATE: Steps = ((GREEN, None), (ORANGE, 0.8), (RED, 1))
NONE_IS_RIGHT: Steps = ((GREEN, None), (RED, 1))
SPEED = (
    "sum(rate(neaptide_steps_predicted_seconds_total{@}[5m])) "
    '/ sum(rate(neaptide_step_seconds_sum{@,phase="total"}[5m]))'
)

ROWS = (
    Row(
        "What is wrong",
        (
            Panel(
                "Targets met, worst tier",
                "percentunit",
                "Share of TTFT and TPOT targets met in 5 minutes, of the tier and target that does worst.",
                (("met", f"min({met('tier, slo', '5m')})"),),
                "stat",
                steps=SHARE_MET,
                empty="no chats",
            ),
            Panel(
                "TTFT p99 over its target",
                "percentunit",
                "The slowest of 100 first tokens in 5 minutes, as a share of the target. Above 100% chats are late.",
                p99("ttft"),
                "stat",
                steps=LATE,
                empty="no chats",
            ),
            Panel(
                "TPOT p99 over its target",
                "percentunit",
                "The slowest of 100 answers' time per token in 5 minutes, as a share of the target.",
                p99("tpot"),
                "stat",
                steps=LATE,
                empty="no chats",
            ),
            Panel(
                "Engines down",
                "none",
                "Servers without an engine: it starts, or it ended and restarts.",
                (("down", "count(neaptide_engine_up{@}) - sum(neaptide_engine_up{@})"),),
                "stat",
                steps=NONE_IS_RIGHT,
            ),
            Panel(
                "Machine's speed, of measured",
                "percentunit",
                "Predicted over measured step time. Below 80% another process uses the machine, or the profile is "
                "another machine's.",
                (("speed", SPEED),),
                "stat",
                steps=((RED, None), (ORANGE, 0.8), (GREEN, 0.9)),
                empty="no steps",
            ),
            Panel(
                "Storage failing",
                "none",
                "Servers that cannot store batch data. Chats go on; batches wait.",
                (("failing", "sum(neaptide_storage_failing{@})"),),
                "stat",
                steps=NONE_IS_RIGHT,
            ),
        ),
    ),
    Row(
        "Chats",
        (
            Panel(
                "TTFT",
                "s",
                "Time to first token by tier, p50 and p99 of 5 minutes. The target of the server is a line.",
                latency("ttft"),
            ),
            Panel(
                "TPOT",
                "s",
                "Mean time per token after the first, by tier, p50 and p99 of 5 minutes, and the target.",
                latency("tpot"),
            ),
            Panel(
                "Targets met",
                "percentunit",
                "Share of choices that met each target in 5 minutes, by tier.",
                (("{{tier}} {{slo}}", met("tier, slo", "5m")),),
                most=1,
                steps=((RED, None), (GREEN, 0.95)),
            ),
            Panel(
                "Requests in flight, by tier",
                "none",
                "Requests between their arrival and the end of their reply.",
                (("{{tier}}", "sum by (tier) (neaptide_requests_in_flight{@})"),),
            ),
            Panel(
                "Running and waiting",
                "none",
                "Requests in the engine. Batch lines that are not admitted yet wait too.",
                (
                    ("{{class}} running", "sum by (class) (neaptide_requests_running{@})"),
                    ("{{class}} waiting", "sum by (class) (neaptide_requests_waiting{@})"),
                ),
            ),
            Panel(
                "Refused and failed",
                "reqps",
                "Requests refused because a tier is full, requests that the engine failed, and 5xx replies, the "
                "gateway's own included.",
                (
                    ("refused, {{tier}}", "sum by (tier) (rate(neaptide_admission_rejected_total{@}[5m]))"),
                    ("engine errors, {{code}}", "sum by (code) (rate(neaptide_engine_errors_total{@}[5m]))"),
                    (
                        "HTTP 5xx",
                        'sum(rate(neaptide_http_requests_total{@,code=~"5.."}[5m])) or vector(0)',
                    ),
                    (
                        "HTTP 5xx of a gateway",
                        'sum(rate(neaptide_cluster_http_requests_total{@,code=~"5.."}[5m])) or vector(0)',
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Work",
        (
            Panel(
                "Tokens computed, by class",
                "cps",
                "Prompt and output tokens per second that steps computed.",
                (("{{class}}", "sum by (class) (rate(neaptide_step_tokens_total{@}[$__rate_interval]))"),),
                is_stacked=True,
            ),
            Panel(
                "KV blocks",
                "none",
                "Blocks of the KV cache by holder. Cached ones are free for whoever needs them.",
                (("{{state}}", "sum by (state) (neaptide_kv_blocks{@})"),),
                is_stacked=True,
            ),
            Panel(
                "Headroom: KV blocks held by online work and reserved for it",
                "none",
                "Batch work may use only what is not reserved for chats. The reserve follows a forecast of 5 s.",
                (
                    ("held", 'sum(neaptide_kv_blocks{@,state="online"})'),
                    ("reserved for chats (forecast)", "sum(neaptide_kv_reserved_blocks{@})"),
                ),
            ),
            Panel(
                "Preemptions",
                "cps",
                "Running requests per second that lost their memory to others.",
                (("{{class}}", "sum by (class) (rate(neaptide_preemptions_total{@}[$__rate_interval]))"),),
            ),
            Panel(
                "Prefix cache hit rate",
                "percentunit",
                "Share of looked-up prompt tokens found in the prefix cache.",
                (
                    (
                        "hits",
                        "sum(rate(neaptide_prefix_cache_hit_tokens_total{@}[5m])) "
                        "/ sum(rate(neaptide_prefix_cache_query_tokens_total{@}[5m]))",
                    ),
                ),
                most=1,
            ),
            Panel("Connections", "none", "Open client connections.", (("open", "sum(neaptide_connections{@})"),)),
        ),
    ),
    Row(
        "Batches",
        (
            Panel(
                "Batch lines",
                "none",
                "Lines of live batches that can still run, and lines that have ended.",
                (
                    ("pending", "max(neaptide_batch_requests_pending{@})"),
                    ("ended, {{outcome}}", "max by (outcome) (neaptide_batch_requests_total{@})"),
                ),
            ),
            Panel(
                "Deadlines: slack of the next batch to expire",
                "s",
                "Time until the first live batch expires, and age of the oldest. No slack without live batches.",
                (
                    ("slack", "min(neaptide_batch_deadline_slack_seconds{@})"),
                    ("age of the oldest", "max(neaptide_batch_oldest_age_seconds{@})"),
                ),
            ),
            Panel(
                "Batches by deadline status",
                "none",
                "Running batches that are on time, at risk, or cannot end in time.",
                (("{{outlook}}", "sum by (outlook) (neaptide_batches_by_outlook{@})"),),
                is_stacked=True,
            ),
        ),
    ),
    Row(
        "Steps and predictions",
        (
            Panel(
                "Mean time of a step",
                "s",
                "Predicted and measured. A gap is what the scheduler does not know of.",
                (
                    (
                        "predicted",
                        "sum(rate(neaptide_steps_predicted_seconds_total{@}[1m])) "
                        "/ sum(rate(neaptide_steps_total{@}[1m]))",
                    ),
                    (
                        "measured",
                        'sum(rate(neaptide_step_seconds_sum{@,phase="total"}[1m])) '
                        '/ sum(rate(neaptide_step_seconds_count{@,phase="total"}[1m]))',
                    ),
                ),
            ),
            Panel(
                "Prediction: error, and steps on time",
                "percentunit",
                "Mean error of predicted step times (above 20% margins grow) and share of steps within their margin "
                "(95% is right).",
                (
                    (
                        "error",
                        "sum(rate(neaptide_step_prediction_error_ratio_sum{@}[5m])) "
                        "/ sum(rate(neaptide_step_prediction_error_ratio_count{@}[5m]))",
                    ),
                    (
                        "steps on time",
                        "sum(rate(neaptide_steps_within_margin_total{@}[5m])) / sum(rate(neaptide_steps_total{@}[5m]))",
                    ),
                ),
                most=1,
            ),
            Panel(
                "Engine and operator",
                "none",
                "Engines that are up, and whether offline work is paused.",
                (
                    ("engines up", "sum(neaptide_engine_up{@})"),
                    ("offline work paused", "max(neaptide_besteffort_paused{@})"),
                ),
            ),
        ),
        is_collapsed=True,
    ),
    Row(
        "Compared with other policies (counterfactual replay)",
        (
            Panel(
                "Both targets met, actual and simulated",
                "percentunit",
                "Windows with fewer than 20 chats are not compared. Empty until there was one.",
                (
                    ("actual", "avg(neaptide_shadow_real_attainment_ratio{@})"),
                    ("under {{policy}}", "avg by (policy) (neaptide_shadow_attainment_ratio{@})"),
                ),
                most=1,
            ),
            Panel(
                "Offline tokens/s, actual and simulated",
                "cps",
                "Batch work in the same windows.",
                (
                    ("actual", "sum(neaptide_shadow_real_offline_tokens_per_second{@})"),
                    ("under {{policy}}", "sum by (policy) (neaptide_shadow_offline_tokens_per_second{@})"),
                ),
            ),
            Panel(
                "Age of the window, and cost",
                "s",
                "The replay takes less than 2% of a core.",
                (
                    ("age of the window", "max(neaptide_shadow_age_seconds{@})"),
                    ("processor seconds per minute", "60 * sum(rate(neaptide_shadow_cpu_seconds_total{@}[10m]))"),
                ),
            ),
        ),
        is_collapsed=True,
    ),
    Row(
        "Replicas behind a gateway",
        (
            Panel(
                "Replicas",
                "none",
                "Replicas by state; only a gateway has this.",
                (("{{state}}", "sum by (state) (neaptide_cluster_replicas{@})"),),
                is_stacked=True,
            ),
            Panel(
                "Replicas: TTFT slack",
                "s",
                "What is left of the TTFT target for a new prompt.",
                (("{{replica}}", "neaptide_cluster_free_slack_seconds{@,$replica}"),),
            ),
            Panel(
                "Replicas: requests forwarded and lost",
                "reqps",
                "Lost: the replica ended before its answer did.",
                (
                    ("{{replica}}", "rate(neaptide_cluster_requests_total{@,$replica}[$__rate_interval])"),
                    ("{{replica}} lost", "rate(neaptide_cluster_lost_requests_total{@,$replica}[$__rate_interval])"),
                ),
            ),
            Panel(
                "Replicas: tokens computed",
                "cps",
                "Tokens per second by replica and class.",
                (
                    (
                        "{{replica}} {{class}}",
                        "sum by (replica, class) "
                        '(rate(neaptide_step_tokens_total{@,replica!="",$replica}[$__rate_interval]))',
                    ),
                ),
            ),
            Panel(
                "Replicas: prefix cache hit rate",
                "percentunit",
                "Routing sends a prompt where its prefix is cached.",
                (
                    (
                        "{{replica}}",
                        'rate(neaptide_prefix_cache_hit_tokens_total{@,replica!="",$replica}[5m]) '
                        '/ rate(neaptide_prefix_cache_query_tokens_total{@,replica!="",$replica}[5m])',
                    ),
                ),
                most=1,
            ),
            Panel(
                "Replicas: leased batch chunks, and leases lost to others",
                "none",
                "Servers that share batches lease 32 to 64 lines at a time.",
                (
                    ("{{replica}} holds", 'neaptide_batch_chunks_held{@,replica!="",$replica}'),
                    ("{{replica}} lost, 1 h", 'increase(neaptide_batch_claims_lost_total{@,replica!="",$replica}[1h])'),
                ),
            ),
        ),
        is_collapsed=True,
    ),
)


def selected(expression: str) -> str:
    """The expression with the board's selectors."""
    return expression.replace("@", SELECT).replace(",$replica}", f",{OF_A_REPLICA}}}")


def board() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top, number = 0, 0
    for row in ROWS:
        number += 1
        head = {"id": number, "type": "row", "title": row.title, "collapsed": row.is_collapsed, "panels": []}
        panels.append(head | {"gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})
        top += 1
        inside = [_panel(number + k + 1, panel, _place(k, panel, top)) for k, panel in enumerate(row.panels)]
        number += len(inside)
        if row.is_collapsed:
            panels[-1]["panels"] = inside
        else:
            panels += inside
            top = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in inside)
    return {
        "uid": "neaptide",
        "title": "Neaptide",
        "description": "What is wrong first, then chats, work and batches. Alerts lead to docs/operations.md.",
        "tags": ["neaptide", "llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    info = "neaptide_build_info"
    chosen = (
        ("model", "Model", f"label_values({info}, model)"),
        ("job", "Job", f'label_values({info}{{model=~"$model"}}, job)'),
        ("instance", "Instance", f'label_values({info}{{model=~"$model",job=~"$job"}}, instance)'),
        ("replica", "Replica", 'label_values(neaptide_cluster_replica_ready{job=~"$job"}, replica)'),
    )
    return [source] + [
        {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "sort": 1,
            "current": {"text": "All", "value": "$__all"},
        }
        for name, label, query in chosen
    ]


def _place(number: int, panel: Panel, top: int) -> dict[str, int]:
    if panel.kind == "stat":
        return {"x": number * STAT_WIDTH, "y": top, "w": STAT_WIDTH, "h": STAT_HEIGHT}
    across, down = number % ACROSS, number // ACROSS
    return {"x": across * WIDTH, "y": top + down * HEIGHT, "w": WIDTH, "h": HEIGHT}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "noValue": panel.empty}
    if panel.most is not None:
        defaults["max"] = panel.most
    steps = panel.steps or PLAIN
    defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": color, "value": low} for color, low in steps]}
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
    options["tooltip"] = {"mode": "multi", "sort": "desc"}
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        options = {"colorMode": "background", "graphMode": "none", "textMode": "value"}
        options["reduceOptions"] = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    else:
        defaults["custom"] = {
            "fillOpacity": 60 if panel.is_stacked else 0,
            "stacking": {"mode": "normal" if panel.is_stacked else "none"},
            "thresholdsStyle": {"mode": "line" if panel.steps else "off"},
        }
    dashed = [{"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}]
    dashed.append({"id": "color", "value": {"mode": "fixed", "fixedColor": RED}})
    has_target = any(name == "target" for name, _ in panel.queries)
    overrides = [{"matcher": {"id": "byName", "options": "target"}, "properties": dashed}] if has_target else []
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + k), "datasource": SOURCE, "legendFormat": name, "expr": selected(expression)}
            for k, (name, expression) in enumerate(panel.queries)
        ],
    }


def panels(found: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels that show something, those in folded rows included."""
    return [inner for panel in found["panels"] for inner in (panel["panels"] if panel["type"] == "row" else [panel])]


def text() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text(), encoding="utf-8")
