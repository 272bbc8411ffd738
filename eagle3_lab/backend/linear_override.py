"""Linear layers done another way for a while, whoever calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class LinearMode(TorchFunctionMode, ABC):
    """While this is active, ``torch.nn.functional.linear`` is :meth:`linear`; within that it is torch's own again, or
    that of the mode around this one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = {} if kwargs is None else kwargs
        return self.linear(*args, **kwargs) if func is nn.functional.linear else func(*args, **kwargs)

    @abstractmethod
    def linear(
        self, input: Float[Tensor, "*rows K"], weight: Float[Tensor, "M K"], bias: Float[Tensor, " M"] | None = None
    ) -> Float[Tensor, "*rows M"]:
        """input W' + bias."""
