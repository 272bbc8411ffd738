"""Functions of tensors that torch compiles as a whole, for those who ask for it.

Between two products lie operations that read and write whole arrays one after another: compiled, they are one pass.
A function marked :func:`fusible` is the plain one until :func:`fusing` is active, and after it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Literal, ParamSpec, TypeVar

import torch

from eagle3_lab.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

COMPILED = 256
"""How many shapes, formats and losses one function may be compiled for in one process, as in a notebook; torch's own
limit of 8 is meant for a function that is compiled anew by mistake."""

_active: ContextVar[bool] = ContextVar("fusing", default=False)


@contextmanager
def fusing(active: bool = True) -> Iterator[None]:
    """While this is active, fusible functions are compiled ones. A backward written by hand runs later, and perhaps in
    another thread: it remembers whether its forward was fused (:func:`is_fusing`)."""
    before = _active.set(active)
    try:
        yield
    finally:
        _active.reset(before)


def is_fusing() -> bool:
    """Whether fusible functions are compiled ones now."""
    return _active.get()


def fusible(shapes: Literal["few", "any"]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function of tensors, numbers and modules, without branches on what tensors hold. Its first call while
    fusing takes some seconds, and so do the first ones with other formats. ``shapes``: "few" is compiled for each of
    the sizes that it meets, so that what it gives never depends on those before; "any" once for all sizes (but for
    those of 1, which torch takes apart).

    Raises:
        UserError: from that call, where compiling fails, as it does without a compiler for C++.
    """
    dynamic = {"few": False, "any": True}[shapes]

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            return _compiled(function, dynamic)(*args, **kwargs) if _active.get() else function(*args, **kwargs)

        return called

    return mark


@cache
def _compiled(function: Callable[P, R], dynamic: bool) -> Callable[P, R]:
    from torch._dynamo import config  # a second of imports, for those who compile
    from torch._dynamo.exc import BackendCompilerFailed

    config.recompile_limit = max(config.recompile_limit, COMPILED)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, COMPILED)
    compiled = torch.compile(function, dynamic=dynamic, fullgraph=True)

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            raise _uncompiled(error) from None

    return run


def require_compiler(on_gpu: bool) -> None:
    """Tell before hours of work, not at the first step behind them, that nothing can be compiled here for want of a
    compiler. Raises UserError."""
    try:
        if on_gpu:
            importlib.import_module("triton")
        else:
            from torch._inductor.cpp_builder import get_cpp_compiler  # a second of imports, for those who compile

            get_cpp_compiler()
    except (ImportError, RuntimeError, OSError) as error:
        raise _uncompiled(error) from None


def _uncompiled(error: Exception) -> UserError:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UserError(
        f"model.compile: true, but torch could not compile on this machine ({why}); a compiler for C++ is needed on a "
        "CPU, triton on a GPU; or leave it out"
    )
