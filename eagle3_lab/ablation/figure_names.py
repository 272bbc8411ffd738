"""The figures that an ablation may ask for, and what each is drawn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What a figure needs beyond the hit tables of all cells: several data ``scales``, or a ``decode`` section."""

    scales: bool = False
    decode: bool = False


FIGURES = {
    "tau": Needs(),
    "n_alpha": Needs(),
    "tau_by_data": Needs(scales=True),
    "n_alpha_by_data": Needs(scales=True),
    "speedup": Needs(decode=True),
}
"""EAGLE-3 (arXiv 2503.01840): ``tau`` and ``speedup`` are bars as in its figure 2, ``n_alpha`` is its figure 7,
``tau_by_data`` its figure 1, ``n_alpha_by_data`` its figure 4. Its table 2 is always made."""
