"""`report`: an ablation's table and figures, into its folder."""

from __future__ import annotations

import sys

from eagle3_lab.ablation import decoding, results
from eagle3_lab.ablation.page import show, write_page
from eagle3_lab.ablation.plan import Ablation


def report(ablation: Ablation) -> str:
    """Write ``results.csv``, figures, and a table into the folder's ``README.md``, between two markers; where there
    is a store of runs, put them beside the ablation's runs too.

    Returns:
        The Markdown between the markers, which is also printed.

    Raises:
        UserError: no result yet, a result of another configuration, or results over other conversations.
    """
    found = results.found(ablation)
    text = write_page(ablation, found, decoding.find(ablation, found))
    print(text, end="")
    if (ablation.tracking.folder / "mlflow.db").is_file():
        print(show(ablation), end="", file=sys.stderr)
    return text
