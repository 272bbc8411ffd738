"""A target of a few tensors, tiny heads on it, and the simplest context that can decode."""

from __future__ import annotations

from draft_fixtures import growing, make_batch, make_lab, make_target, oracle_target  # noqa: F401
