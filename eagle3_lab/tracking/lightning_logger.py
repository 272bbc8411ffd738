"""Lightning's logger interface over one of our runs."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

from eagle3_lab.tracking.run import Run


class RunLogger(Logger):
    """Sends what ``self.log`` collects in a step to a run, in one call a step.

    The run outlives the trainer (evaluation follows training in it), so ``finalize`` leaves it open: whoever opened it
    finishes it. Ranks other than 0 give None and log nothing.

    A metric has one point a step: steps behind the last checkpoint that a killed process had logged are made again by
    the next one, to the same values, and are not logged again.
    """

    def __init__(self, run: Run | None) -> None:
        super().__init__()
        self.run = run
        self._steps: dict[str, set[int]] = {}

    @property
    def name(self) -> str | None:
        """The run's name."""
        return self.run.name if self.run else None

    @property
    def version(self) -> str | None:
        """The run's id."""
        return self.run.id if self.run else None

    @property
    def save_dir(self) -> str | None:
        """The store's folder."""
        return str(self.run.folder) if self.run else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.run is None:
            return
        at = step or 0
        for name in metrics.keys() - self._steps.keys():
            self._steps[name] = self.run.steps_of(name)
        fresh = {name: value for name, value in metrics.items() if at not in self._steps[name]}
        if not fresh:
            return
        try:
            self.run.log_metrics(fresh, at)
        except BaseException:
            self._steps.clear()  # interrupted: the store itself knows what it has
            raise
        for name in fresh:
            self._steps[name].add(at)

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        if self.run:
            self.run.log_params(params)
