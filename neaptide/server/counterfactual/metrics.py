"""Series of the counterfactual replay and its cost."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from neaptide.server.counterfactual.frames import ShadowAnswer

POLICIES = ("priority", "fcfs")
"""Policies that an operator would otherwise use: vLLM v1's schedulers."""
OUTCOMES = ("compared", "too_few", "too_short", "failed")
UNKNOWN = float("nan")


class ShadowMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"neaptide_shadow_{name}", text, labels, registry=registry)

        self._requests = gauge("requests", "Number of online requests of the window that were judged.")
        self._window = gauge("window_seconds", "Length of the simulated window; 0 before the first.")
        self.age = gauge("age_seconds", "Time since the end of the window.")
        self._real_attainment = gauge("real_attainment_ratio", "Share that met both targets under the served policy.")
        self._real_offline = gauge("real_offline_tokens_per_second", "Offline tokens per second, served policy.")
        by_policy = ("policy",)
        self._attainment = gauge(
            "attainment_ratio", "Share that met both targets under the simulated policy.", by_policy
        )
        self._offline = gauge(
            "offline_tokens_per_second", "Offline tokens per second in the simulated policy.", by_policy
        )
        self._saved = gauge(
            "saved_targets", "Number of online requests that met both targets, less those in the simulation.", by_policy
        )
        self._won = gauge(
            "won_offline_tokens", "Number of offline tokens of the window, less those in the simulation.", by_policy
        )
        self.rounds = Counter(
            "neaptide_shadow_rounds_total", "Number of replays, by outcome.", ["outcome"], registry=registry
        )
        self.cpu = Counter("neaptide_shadow_cpu_seconds_total", "Processor time of the replays.", registry=registry)
        for outcome in OUTCOMES:
            self.rounds.labels(outcome)
        for name in (self._real_attainment, self._real_offline):
            name.set(UNKNOWN)
        for policy in POLICIES:
            for of_policy in (self._attainment, self._offline, self._saved, self._won):
                of_policy.labels(policy).set(UNKNOWN)

    def show(self, answer: ShadowAnswer) -> None:
        real, requests, length_s = answer.real, answer.requests, answer.end_s - answer.start_s
        assert real is not None
        self._requests.set(requests)
        self._window.set(length_s)
        self._real_attainment.set(real.met / requests if requests else UNKNOWN)
        self._real_offline.set(_known(real.offline_tokens_per_s))
        for policy, figures in answer.shadows.items():
            rate = _known(figures.offline_tokens_per_s)
            self._attainment.labels(policy).set(figures.met / requests if requests else UNKNOWN)
            self._offline.labels(policy).set(rate)
            self._saved.labels(policy).set(real.met - figures.met if requests else UNKNOWN)
            self._won.labels(policy).set((_known(real.offline_tokens_per_s) - rate) * length_s)


def _known(value: float | None) -> float:
    return UNKNOWN if value is None else value
