"""`ui`: look at an experiment's runs in the browser."""

from __future__ import annotations

import sys

from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.tracking.run import serve_ui


def ui(experiment: Experiment, *, port: int = 5000) -> None:
    """Serve MLflow's pages over the experiment's store, until interrupted. A store that was moved is mended first.

    Args:
        experiment: its ``tracking.folder`` is shown.
        port: of http://127.0.0.1.

    Raises:
        UserError: no such port, no runs in that folder yet, or a server that did not start.
    """
    if not 1 <= port <= 65535:
        raise UserError(f"--port: must be within 1 .. 65535, got {port}")
    print(f"http://127.0.0.1:{port}", file=sys.stderr)
    if code := serve_ui(experiment.tracking.folder, port):
        raise UserError(f"ui: the server ended with status {code}, see above; is --port {port} taken?")
