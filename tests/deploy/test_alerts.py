"""Which alerts fire when: the rules run in promtool over made series, and so does what the board divides.

All cases are in one world, each with a target or a tier of its own: ``@`` stands for its name.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.deploy.test_deploy import DEPLOY
from tools import grafana_board

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")

RULES = DEPLOY / "prometheus" / "alerts.yml"
MET, MISSED = "neaptide_slo_attained_total", "neaptide_slo_violated_total"
UP, STARTS, HTTP = "neaptide_engine_up", "neaptide_engine_starts_total", "neaptide_http_requests_total"
REPLICAS, PASSED_ON = "neaptide_cluster_replicas", "neaptide_cluster_requests_total"
LIVES = "neaptide_cluster_replica_starts_total"
ERROR, ERRORS = "neaptide_step_prediction_error_ratio_sum", "neaptide_step_prediction_error_ratio_count"
INFO = "neaptide_build_info"
PENDING = 'neaptide_batch_requests_pending{job="@"}'
ENDED = 'neaptide_batch_requests_total{job="@",outcome="completed"}'
OFFLINE = 'neaptide_step_tokens_total{job="@",class="offline"}'
ALWAYS = "x80"
STARTED_AGAIN = "100x3 200x3 300x3 400" + ALWAYS


def of_target(name: str, labels: str = "") -> str:
    """A series as a Prometheus has it that scraped ``@``."""
    return f'{name}{{job="neaptide",instance="@"{labels and ","}{labels}}}'


def of_slo(name: str, slo: str) -> str:
    return of_target(name, f'tier="@",slo="{slo}"')


def served(code: int, route: str = "/v1/chat/completions") -> str:
    return of_target(HTTP, f'route="{route}",method="POST",code="{code}"')


def by_gateway(code: int) -> str:
    return served(code).replace("neaptide_http", "neaptide_cluster_http")


class Case(NamedTuple):
    """Values are every minute, in promtool's notation."""

    alert: str
    series: dict[str, str]
    at: str
    fires: dict[str, str] | None
    """The labels that tell which, beside the severity; None if it does not fire."""


TARGET = {"job": "neaptide", "instance": "@"}
DIES_AND_IS_GONE = {of_target(UP): "1x4 0" + ALWAYS, of_target(STARTS): "1" + ALWAYS}
ALL_MISSED = {of_slo(MET, "ttft"): "0" + ALWAYS, of_slo(MISSED, "ttft"): "0+10" + ALWAYS}
CASES = (
    Case("NeaptideDown", {of_target("up"): "1x4 0" + ALWAYS, of_target(INFO): "1x4"}, "6m", TARGET),
    Case("NeaptideDown", {of_target("up"): "1x4 0" + ALWAYS, of_target(REPLICAS): "1x4"}, "6m", TARGET),
    Case("NeaptideDown", {of_target("up"): "1" + ALWAYS, of_target(INFO): "1" + ALWAYS}, "7m", None),
    Case("NeaptideDown", {of_target("up"): "0" + ALWAYS}, "7m", None),  # no server of ours
    # the engine
    Case("NeaptideEngineDown", DIES_AND_IS_GONE, "6m", TARGET),
    Case("NeaptideEngineDown", DIES_AND_IS_GONE, "5m", None),
    Case("NeaptideEngineDown", {of_target(UP): "0" + ALWAYS, of_target(STARTS): "0" + ALWAYS}, "25m", None),
    Case("NeaptideEngineDown", {of_target(UP): "1" + ALWAYS, of_target(STARTS): "1" + ALWAYS}, "25m", None),
    Case(
        "NeaptideEngineDown",
        {of_target(UP, f'replica="{name}"'): f"{up}" + ALWAYS for name, up in (("x", 0), ("y", 1))}
        | {of_target(STARTS, f'replica="{name}"'): "1" + ALWAYS for name in "xy"},
        "25m",
        None,
    ),
    *(
        Case(
            "NeaptideEngineDown",
            {of_target(REPLICAS, 'state="ready"'): ready, of_target(PASSED_ON, 'replica="x"'): passed},
            "7m",
            fires,
        )
        for ready, passed, fires in (
            ("2x4 0" + ALWAYS, "9" + ALWAYS, TARGET),
            ("2x4 1" + ALWAYS, "9" + ALWAYS, None),
            ("0" + ALWAYS, "0" + ALWAYS, None),
        )
    ),
    Case("NeaptideEngineStartsLong", {of_target(UP): "0" + ALWAYS}, "31m", TARGET),
    Case("NeaptideEngineStartsLong", {of_target(UP): "0x28 1" + ALWAYS}, "31m", None),
    Case("NeaptideRestarts", {of_target(STARTS): "1x4 2x4 3x4 4" + ALWAYS}, "20m", TARGET),
    Case("NeaptideRestarts", {of_target(STARTS): "1x4 2x4 3" + ALWAYS}, "20m", None),
    Case(
        "NeaptideRestarts",
        {of_target("process_start_time_seconds"): STARTED_AGAIN, of_target(INFO): "1" + ALWAYS},
        "20m",
        TARGET,
    ),
    Case(
        "NeaptideRestarts",
        {of_target("process_start_time_seconds"): STARTED_AGAIN, of_target(REPLICAS): "1" + ALWAYS},
        "20m",
        TARGET,
    ),
    Case("NeaptideRestarts", {of_target("process_start_time_seconds"): STARTED_AGAIN}, "20m", None),
    Case(
        "NeaptideRestarts",
        {of_target(STARTS, f'replica="{k}"'): f"0x{3 * k} 1" + ALWAYS for k in (1, 2, 3, 4)},
        "20m",
        None,
    ),
    Case("NeaptideRestarts", {of_target(LIVES, 'replica="x"'): "1x4 2x4 3x4 4" + ALWAYS}, "20m", TARGET),
    Case("NeaptideRestarts", {of_target(LIVES, f'replica="{k}"'): f"1x{k} 2" + ALWAYS for k in (3, 5, 7)}, "20m", None),
    # answers
    Case("NeaptideAnswersFail", {served(200): "0+90" + ALWAYS, served(503): "0+10" + ALWAYS}, "15m", TARGET),
    Case("NeaptideAnswersFail", {served(200): "0+97" + ALWAYS, served(503): "0+3" + ALWAYS}, "15m", None),
    Case("NeaptideAnswersFail", {served(200): "0" + ALWAYS, served(500): "0x4 4" + ALWAYS}, "10m", None),
    Case("NeaptideAnswersFail", {served(503, "/ready"): "0+10" + ALWAYS}, "15m", None),
    Case("NeaptideAnswersFail", {served(503): "0+10" + ALWAYS, of_target(STARTS): "0" + ALWAYS}, "15m", None),
    Case("NeaptideAnswersFail", {served(503): "0+10" + ALWAYS, of_target(STARTS): "1" + ALWAYS}, "15m", TARGET),
    *(
        Case(
            "NeaptideAnswersFail",
            {
                by_gateway(200): "0+90" + ALWAYS,
                by_gateway(503): "0+10" + ALWAYS,
                of_target(PASSED_ON, 'replica="x"'): passed + ALWAYS,
                of_target(HTTP, 'route="/v1/responses",method="POST",code="200",replica="x"'): "0+90" + ALWAYS,
                of_target(STARTS, 'replica="x"'): starts + ALWAYS,
            },
            "15m",
            fires,
        )
        for passed, starts, fires in (("9", "1", TARGET), ("0", "1", None), ("9", "0", None))
    ),
    # targets
    Case("NeaptideTargetsMissed", ALL_MISSED, "25m", {"job": "neaptide", "tier": "@", "slo": "ttft"}),
    Case(
        "NeaptideTargetsMissed",
        {
            of_slo(MET, "ttft"): "0+91" + ALWAYS,
            of_slo(MISSED, "ttft"): "0+9" + ALWAYS,
            of_slo(MET, "tpot"): "0+100" + ALWAYS,
            of_slo(MISSED, "tpot"): "0" + ALWAYS,
        },
        "25m",
        {"job": "neaptide", "tier": "@", "slo": "ttft"},
    ),
    Case(
        "NeaptideTargetsMissed",
        {of_slo(MET, "ttft"): "0+96" + ALWAYS, of_slo(MISSED, "ttft"): "0+4" + ALWAYS},
        "25m",
        None,
    ),
    Case(
        "NeaptideTargetsMissed",
        {of_slo(MET, "ttft"): "50" + ALWAYS, of_slo(MISSED, "ttft"): "0x9 1" + ALWAYS},
        "17m",
        None,
    ),
    # the others
    Case(
        "NeaptideStepsPredictedBadly",
        {of_target(ERROR): "0+3" + ALWAYS, of_target(ERRORS): "0+10" + ALWAYS},
        "30m",
        TARGET,
    ),
    Case(
        "NeaptideStepsPredictedBadly",
        {of_target(ERROR): "0+1" + ALWAYS, of_target(ERRORS): "0+10" + ALWAYS},
        "30m",
        None,
    ),
    *(
        Case(alert, {of_target("neaptide_batches_by_outlook", f'outlook="{outlook}"'): n + ALWAYS}, "40m", fires)
        for alert, outlook in (("NeaptideBatchInfeasible", "infeasible"), ("NeaptideBatchAtRisk", "at_risk"))
        for n, fires in (("1", TARGET | {"outlook": outlook}), ("0", None))
    ),
    *(
        Case(
            "NeaptideBatchStandsStill",
            {
                PENDING: "3" + ALWAYS,
                ENDED: ended,
                OFFLINE: tokens,
                'neaptide_besteffort_paused{job="@"}': paused,
            },
            "35m",
            fires,
        )
        for ended, tokens, paused, fires in (
            ("7" + ALWAYS, "900" + ALWAYS, "0" + ALWAYS, {"job": "@"}),
            ("0+1" + ALWAYS, "900" + ALWAYS, "0" + ALWAYS, None),
            ("7" + ALWAYS, "0+9" + ALWAYS, "0" + ALWAYS, None),
            ("7" + ALWAYS, "900" + ALWAYS, "1" + ALWAYS, None),
        )
    ),
    *(
        Case(alert, {of_target(name): n + ALWAYS}, "70m", fires)
        for alert, name in (
            ("NeaptideStorageFailing", "neaptide_storage_failing"),
            ("NeaptideOfflinePaused", "neaptide_besteffort_paused"),
        )
        for n, fires in (("1", TARGET), ("0", None))
    ),
    *(
        Case("NeaptideEngineErrors", {of_target("neaptide_engine_errors_total", 'code="other"'): n}, "8m", fires)
        for n, fires in (("0x4 1" + ALWAYS, TARGET | {"code": "other"}), ("1" + ALWAYS, None))
    ),
    *(
        Case("NeaptideRefusesRequests", {of_target("neaptide_admission_rejected_total", 'tier="@"'): n}, "15m", fires)
        for n, fires in (("0+1" + ALWAYS, {"job": "neaptide", "tier": "@"}), ("7" + ALWAYS, None))
    ),
    *(
        Case("NeaptideRefusesConnections", {of_target(f"{name}_ended_total", 'reason="refused"'): n}, "15m", fires)
        for name in ("neaptide_connections", "neaptide_cluster_connections")
        for n, fires in (("0+1" + ALWAYS, TARGET), ("7" + ALWAYS, None))
    ),
    *(
        Case("NeaptideReplicaDown", {of_target("neaptide_cluster_replica_ready", 'replica="x"'): n}, "5m", fires)
        for n, fires in (("0" + ALWAYS, TARGET | {"replica": "x"}), ("1" + ALWAYS, None))
    ),
)


PLACES = {"NeaptideTargetsMissed": "tier", "NeaptideRefusesRequests": "tier", "NeaptideBatchStandsStill": "job"}
"""The label that tells cases apart, where it is not the instance."""


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}


def ran(tmp_path: Path, series: dict[str, str], tests: list[dict[str, Any]]) -> str:
    """What promtool has against these answers to queries; empty if nothing."""
    path = tmp_path / "tests.yml"
    shutil.copy(RULES, tmp_path)
    world = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": tests,
    }
    path.write_text(yaml.safe_dump({"rule_files": [RULES.name], "evaluation_interval": "1m", "tests": [world]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def labelled(**labels: str) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def test_every_alert_is_seen_to_fire_and_not_to() -> None:
    of_name = rules()
    for wanted in (True, False):
        seen = {case.alert for case in CASES if (case.fires is not None) is wanted}
        assert seen | {"NeaptideAbsent"} == set(of_name)
    for case in CASES:
        said = set(re.findall(r"\$labels\.(\w+)", str(of_name[case.alert]["annotations"])))
        assert case.fires is None or said <= set(case.fires), case.alert


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    of_name = rules()
    series: dict[str, str] = {}
    tests = []
    for k, case in enumerate(CASES):
        name = f"case-{k}"
        series |= {one.replace("@", name): values for one, values in case.series.items()}
        firing = {"alertname": case.alert, "alertstate": "firing"}
        place = PLACES.get(case.alert, "instance")
        samples = []
        if case.fires is not None:
            told = {label: value.replace("@", name) for label, value in case.fires.items()}
            samples = [
                {"labels": f"ALERTS{{{labelled(**firing, **of_name[case.alert]['labels'], **told)}}}", "value": 1}
            ]
        expression = f"ALERTS{{{labelled(**firing, **{place: name})}}}"
        tests.append({"expr": expression, "eval_time": case.at, "exp_samples": samples})
    assert ran(tmp_path, series, tests) == ""


@pytest.mark.parametrize(
    ("series", "is_firing"),
    [
        ({of_target(UP): "1x4"}, True),
        ({of_target(UP): "1" + ALWAYS}, False),
        ({of_target(REPLICAS): "1" + ALWAYS}, False),
        ({of_target(UP): "1x4", of_target(INFO): "1x4", of_target("up"): "1x4 0" + ALWAYS}, False),  # it is down
    ],
)
def test_servers_that_nobody_scrapes_are_missed(tmp_path: Path, series: dict[str, str], is_firing: bool) -> None:
    told = {"alertname": "NeaptideAbsent", "alertstate": "firing", "severity": "page"}
    samples = [{"labels": f"ALERTS{{{labelled(**told)}}}", "value": 1}] if is_firing else []
    test = {
        "expr": 'ALERTS{alertname="NeaptideAbsent",alertstate="firing"}',
        "eval_time": "25m",
        "exp_samples": samples,
    }
    assert ran(tmp_path, series, [test]) == ""


def test_the_board_shows_the_share_of_targets_met(tmp_path: Path) -> None:
    """Also where none is, or all are."""
    (panel,) = (one for one in grafana_board.panels(grafana_board.board()) if one["title"] == "Targets met")
    met = {("default", "ttft"): 0, ("default", "tpot"): 8, ("priority", "ttft"): 6}
    series: dict[str, str] = {}
    for (tier, slo), num_met in met.items():
        for name, n in ((MET, num_met), (MISSED, 8 - num_met)):
            series[of_slo(name, slo).replace("@", tier)] = f"0+{n}{ALWAYS}"
    samples = [{"labels": f"{{{labelled(tier=tier, slo=slo)}}}", "value": n / 8} for (tier, slo), n in met.items()]
    expression = panel["targets"][0]["expr"].replace("$job", ".*").replace("$instance", ".*")
    test = {"expr": expression, "eval_time": "20m", "exp_samples": samples}
    assert ran(tmp_path, series, [test]) == ""
