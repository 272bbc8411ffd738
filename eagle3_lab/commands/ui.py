"""`ui`: look at an experiment's runs in the browser."""

from __future__ import annotations

import sys

from eagle3_lab.experiment import Experiment
from eagle3_lab.tracking import serve_ui


def ui(experiment: Experiment, *, port: int = 5000) -> None:
    """Serve MLflow's pages over the experiment's store, until interrupted. A store that was moved is mended first.

    Args:
        experiment: its ``tracking.folder`` is shown.
        port: of http://127.0.0.1.

    Raises:
        UserError: no runs in that folder yet.
    """
    print(f"http://127.0.0.1:{port}", file=sys.stderr)
    serve_ui(experiment.tracking.folder, port)
