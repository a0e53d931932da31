"""Writes the Grafana board: ``python -m tools.grafana_board``. A test checks that the file is up to date.

Panels show sums over replicas; database series exist only once.
"""

import json
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "neaptide.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 8, 8
ACROSS = 3
Query = tuple[str, str]
"""Legend of a line, and its expression."""

PANELS: tuple[tuple[str, str, bool, tuple[Query, ...]], ...] = (
    (
        "Tokens computed, by class",
        "short",
        True,
        (("{{class}}", "sum by (class) (rate(neaptide_step_tokens_total[$__rate_interval]))"),),
    ),
    (
        "Targets met",
        "percentunit",
        False,
        (
            (
                "{{tier}} {{slo}}",
                "sum by (tier, slo) (rate(neaptide_slo_attained_total[5m])) / (sum by (tier, slo) "
                "(rate(neaptide_slo_attained_total[5m])) + sum by (tier, slo) (rate(neaptide_slo_violated_total[5m])))",
            ),
        ),
    ),
    (
        "TTFT",
        "s",
        False,
        tuple(
            (
                f"{{{{tier}}}} p{q}",
                f"histogram_quantile(0.{q}, sum by (tier, le) (rate(neaptide_request_ttft_seconds_bucket[5m])))",
            )
            for q in (50, 99)
        ),
    ),
    (
        "TPOT",
        "s",
        False,
        tuple(
            (
                f"{{{{tier}}}} p{q}",
                f"histogram_quantile(0.{q}, sum by (tier, le) (rate(neaptide_request_tpot_seconds_bucket[5m])))",
            )
            for q in (50, 99)
        ),
    ),
    ("Requests in flight, by tier", "short", False, (("{{tier}}", "sum by (tier) (neaptide_requests_in_flight)"),)),
    (
        "Running and waiting",
        "short",
        False,
        (
            ("{{class}} running", "sum by (class) (neaptide_requests_running)"),
            ("{{class}} waiting", "sum by (class) (neaptide_requests_waiting)"),
        ),
    ),
    ("KV blocks", "short", True, (("{{state}}", "sum by (state) (neaptide_kv_blocks)"),)),
    (
        "Headroom: KV blocks held by online work and reserved for it",
        "short",
        False,
        (
            ("held", 'sum(neaptide_kv_blocks{state="online"})'),
            ("reserved for chats (forecast)", "sum(neaptide_kv_reserved_blocks)"),
        ),
    ),
    (
        "Preemptions",
        "short",
        False,
        (("{{class}}", "sum by (class) (rate(neaptide_preemptions_total[$__rate_interval]))"),),
    ),
    (
        "Mean time of a step",
        "s",
        False,
        (
            (
                "predicted",
                "sum(rate(neaptide_steps_predicted_seconds_total[1m])) / sum(rate(neaptide_steps_total[1m]))",
            ),
            (
                "measured",
                'sum(rate(neaptide_step_seconds_sum{phase="total"}[1m])) '
                '/ sum(rate(neaptide_step_seconds_count{phase="total"}[1m]))',
            ),
        ),
    ),
    (
        "Prediction: error, and steps on time",
        "percentunit",
        False,
        (
            (
                "error",
                "sum(rate(neaptide_step_prediction_error_ratio_sum[5m])) "
                "/ sum(rate(neaptide_step_prediction_error_ratio_count[5m]))",
            ),
            (
                "steps on time",
                "sum(rate(neaptide_steps_within_margin_total[5m])) / sum(rate(neaptide_steps_total[5m]))",
            ),
        ),
    ),
    (
        "Prefix cache hit rate",
        "percentunit",
        False,
        (
            (
                "hits",
                "sum(rate(neaptide_prefix_cache_hit_tokens_total[5m])) "
                "/ sum(rate(neaptide_prefix_cache_query_tokens_total[5m]))",
            ),
        ),
    ),
    (
        "Batch lines",
        "short",
        False,
        (("pending", "neaptide_batch_requests_pending"), ("ended, {{outcome}}", "neaptide_batch_requests_total")),
    ),
    (
        "Deadlines: slack of the next batch to expire",
        "s",
        False,
        (
            ("slack", "neaptide_batch_deadline_slack_seconds"),
            ("age of the oldest", "neaptide_batch_oldest_age_seconds"),
        ),
    ),
    ("Batches by deadline status", "short", True, (("{{outlook}}", "sum by (outlook) (neaptide_batches_by_outlook)"),)),
    (
        "Refused and failed",
        "short",
        False,
        (
            ("refused, {{tier}}", "sum by (tier) (rate(neaptide_admission_rejected_total[5m]))"),
            ("engine errors, {{code}}", "sum by (code) (rate(neaptide_engine_errors_total[5m]))"),
            ("HTTP 5xx", 'sum(rate(neaptide_http_requests_total{code=~"5.."}[5m]))'),
            (
                "HTTP 5xx of a gateway",
                'sum(rate(neaptide_cluster_http_requests_total{code=~"5.."}[5m]))',
            ),
        ),
    ),
    (
        "Engine and operator",
        "short",
        False,
        (
            ("engines up", "sum(neaptide_engine_up)"),
            ("offline work paused", "max(neaptide_besteffort_paused)"),
            ("disk failing", "max(neaptide_storage_failing)"),
        ),
    ),
    ("Connections", "short", False, (("open", "sum(neaptide_connections)"),)),
    (
        "Counterfactual replay: both targets met, actual and simulated",
        "percentunit",
        False,
        (
            ("actual", "avg(neaptide_shadow_real_attainment_ratio)"),
            ("under {{policy}}", "avg by (policy) (neaptide_shadow_attainment_ratio)"),
        ),
    ),
    (
        "Counterfactual replay: offline tokens/s, actual and simulated",
        "short",
        False,
        (
            ("actual", "sum(neaptide_shadow_real_offline_tokens_per_second)"),
            ("under {{policy}}", "sum by (policy) (neaptide_shadow_offline_tokens_per_second)"),
        ),
    ),
    (
        "Counterfactual replay: age of its window, and its cost",
        "s",
        False,
        (
            ("age of the window", "max(neaptide_shadow_age_seconds)"),
            ("processor seconds per minute", "60 * sum(rate(neaptide_shadow_cpu_seconds_total[10m]))"),
        ),
    ),
    ("Replicas", "short", True, (("{{state}}", "neaptide_cluster_replicas"),)),
    (
        "Replicas: TTFT slack",
        "s",
        False,
        (("{{replica}}", "neaptide_cluster_free_slack_seconds"),),
    ),
    (
        "Replicas: requests forwarded and lost",
        "reqps",
        False,
        (
            ("{{replica}}", "rate(neaptide_cluster_requests_total[$__rate_interval])"),
            ("{{replica}} lost", "rate(neaptide_cluster_lost_requests_total[$__rate_interval])"),
        ),
    ),
    (
        "Replicas: tokens computed",
        "short",
        False,
        (
            (
                "{{replica}} {{class}}",
                'sum by (replica, class) (rate(neaptide_step_tokens_total{replica!=""}[$__rate_interval]))',
            ),
        ),
    ),
    (
        "Replicas: prefix cache hit rate",
        "percentunit",
        False,
        (
            (
                "{{replica}}",
                'rate(neaptide_prefix_cache_hit_tokens_total{replica!=""}[5m]) '
                "/ rate(neaptide_prefix_cache_query_tokens_total[5m])",
            ),
        ),
    ),
    (
        "Replicas: leased batch chunks, and leases lost to others",
        "short",
        False,
        (
            ("{{replica}} holds", 'neaptide_batch_chunks_held{replica!=""}'),
            ("{{replica}} lost, 1 h", 'increase(neaptide_batch_claims_lost_total{replica!=""}[1h])'),
        ),
    ),
)
"""Title, unit, whether lines are stacked, queries."""


def board() -> dict[str, Any]:
    return {
        "uid": "neaptide",
        "title": "Neaptide",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, title: str, unit: str, stacked: bool, queries: tuple[Query, ...]) -> dict[str, Any]:
    custom = {"fillOpacity": 60 if stacked else 0, "stacking": {"mode": "normal" if stacked else "none"}}
    across, down = number % ACROSS, number // ACROSS
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": across * WIDTH, "y": down * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + k), "datasource": SOURCE, "legendFormat": name, "expr": expression}
            for k, (name, expression) in enumerate(queries)
        ],
    }


def text() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text(), encoding="utf-8")
