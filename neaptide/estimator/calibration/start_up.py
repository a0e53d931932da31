"""Chooses an engine's first cost model: from a given profile, from a saved profile, or by measuring."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from neaptide.engine.clock import Clock
from neaptide.engine.private_files import private_opener
from neaptide.estimator.calibration.micro_runs import MicroRunner, Parts, shape_of
from neaptide.estimator.calibration.steps import CalibrationLimits, start_steps
from neaptide.estimator.cost.iteration_time import StepSample
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile, save_profile
from neaptide.estimator.subject import Subject, check_profile

logger = logging.getLogger(__name__)

ROUNDS = 2
MAX_STEP_S = 1.0
"""Steps predicted to take longer are skipped."""
MAX_TOTAL_S = 10.0
"""Time limit of the measurement, so that a slow machine still starts quickly."""
WARM_UP_S = 2.0
"""Time limit of the warm-up if there is a profile; the next value limits a step."""
WARM_UP_STEP_S = 0.25


class StartUp:
    """Builds the cost model of a starting engine, and warms up its executor.

    Args:
        runner: over the engine's executor, whose first blocks have been written to.
        kept_in: directory of the profiles that earlier starts saved.
    """

    def __init__(
        self,
        runner: MicroRunner,
        clock: Clock,
        limits: CalibrationLimits,
        subject: Subject,
        date: str,
        kept_in: Path | None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._steps = [parts for parts in start_steps(limits) if runner.fits(parts)]
        self._subject = subject
        self._date = date
        self.observed: list[StepSample] = []
        """Steps that the cost model has observed, in order."""
        self._file: Path | None = None
        if kept_in is not None and subject.model_fingerprint:
            self._file = kept_in / subject.file_name(limits, self._steps)

    def cost_model(self, profile: str | None) -> OnlineCostModel:
        """The cost model from ``profile`` (a name or a file) if given, else from a saved profile, else measured.

        Raises:
            ValueError: the profile does not exist, or does not fit this model.
            OSError: its file cannot be read.
        """
        start_s = self._clock.now()
        base = self._given(profile) if profile is not None else self._kept()
        if base is not None:
            model = OnlineCostModel(base)
            self.observed = [sample for _, sample in self._run(model, 1, WARM_UP_S, WARM_UP_STEP_S)]
            source = f"profile {profile}" if profile is not None else "kept from an earlier start"
        else:
            runs = list(self._run(OnlineCostModel(RooflineModel.generic()), ROUNDS, MAX_TOTAL_S, MAX_STEP_S))
            model = OnlineCostModel(self._measured(runs))
            self.observed = [sample for _, sample in runs]
            for sample in self.observed:
                model.observe(sample.shape, sample.seconds)
            source = "measured"
        took_s = self._clock.now() - start_s
        logger.info("warmed up with %d steps in %.1f s, cost model: %s", len(self.observed), took_s, source)
        return model

    def _given(self, name: str) -> RooflineModel:
        profile = load_profile(name)
        for difference in check_profile(profile, self._subject):
            logger.warning("profile %s was made for %s: its step times may be wrong at first", name, difference)
        return RooflineModel.from_profile(profile)

    def _kept(self) -> RooflineModel | None:
        if self._file is None or not self._file.exists():
            return None
        try:
            profile = load_profile(self._file)
            check_profile(profile, self._subject)
            return RooflineModel.from_profile(profile)
        except (ValueError, OSError) as error:
            logger.warning("the saved profile of an earlier start cannot be used: %s", error)
            return None

    def _measured(self, runs: list[tuple[Parts, StepSample]]) -> RooflineModel:
        """Fits a model to the shortest run of each step.

        The first runs warm up, and other processes of a starting server compete for cores. The profile is saved only if
        every step has run: a slow start must not affect all later ones.
        """
        model = RooflineModel()
        shortest: dict[Parts, StepSample] = {}
        for parts, sample in runs:
            if parts not in shortest or sample.seconds < shortest[parts].seconds:
                shortest[parts] = sample
        if not shortest:
            return model
        model.fit(list(shortest.values()))
        if len(shortest) == len(self._steps):
            self._keep(model)
        elif self._file is not None:
            logger.info(
                "calibration was cut short (%d of %d measurements); it runs again at the next start",
                len(shortest),
                len(self._steps),
            )
        return model

    def _keep(self, model: RooflineModel) -> None:
        if self._file is None:
            return
        partial = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb", opener=private_opener):
                pass  # owner-only permissions before the first byte
            save_profile(self._subject.profile(self._file.stem, self._date, model.costs), partial)
            partial.replace(self._file)
        except OSError as error:
            logger.warning("the profile cannot be saved for the next start: %s", error)

    def _run(
        self, model: OnlineCostModel, rounds: int, max_total_s: float, max_step_s: float
    ) -> Iterator[tuple[Parts, StepSample]]:
        """Runs the steps in rounds and lets the model observe their times."""
        start_s = self._clock.now()
        shapes = [(parts, shape_of(parts)) for parts in self._steps]
        for parts, shape in shapes * rounds:
            if self._clock.now() - start_s > max_total_s:
                return
            if model.predict(shape).seconds <= max_step_s:
                seconds = self._runner.run(parts)
                model.observe(shape, seconds)
                yield parts, StepSample(shape, seconds)
