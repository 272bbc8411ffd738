"""eagle3_lab: train draft heads for speculative decoding and measure them under one lossless decoder.

In a notebook:

    from eagle3_lab import evaluate, fit, load

    experiment = load("experiments/quickstart.yaml", "model.unroll.depth=3")
    fit(experiment)

Names are imported when they are asked for, so that a command line's mistakes are told without loading torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "load": "eagle3_lab.experiment",
    "prepare": "eagle3_lab.commands.prepare",
    "fit": "eagle3_lab.commands.fit",
    "evaluate": "eagle3_lab.commands.evaluate",
    "generate": "eagle3_lab.commands.generate",
    "export": "eagle3_lab.commands.export",
}

__all__ = ["evaluate", "export", "fit", "generate", "load", "prepare"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _NAMES:
        raise AttributeError(f"module 'eagle3_lab' has no attribute {name!r}")
    return vars(importlib.import_module(_NAMES[name]))[name]
