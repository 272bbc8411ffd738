"""Verbs and what they are made of, on the tiny target: nothing reaches the user's cache."""

from __future__ import annotations

from byte_tokenizers import chatml  # noqa: F401  a fixture
from private_cache import private_cache  # noqa: F401  a fixture that every test here uses
