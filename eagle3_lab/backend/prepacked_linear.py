"""Linear layers of a frozen model in a layout that oneDNN prepared beforehand, alone or several of one input as one.

``PackedLinear`` keeps a weight as oneDNN lays it out; ``Siblings`` computes several linear maps that read the same rows
(q, k, v; gate, up) in one product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

M = TypeVar("M", bound=nn.Module)

ROWS = 16  # a tree's worth; at 1 row as fast as a layout made for 1, at 512 as one made for 128 (measured)


class Family(ABC):
    """Layers that multiply together (:mod:`eagle3_lab.backend.prepacked_linear`)."""

    @abstractmethod
    def product(self, layer: PackedLinear, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"] | None:
        """``layer``'s product; None where it must multiply alone."""


class WeightState:
    """A weight as it is now: which tensor, and after which changes.

    A change is seen by the tensor's version, or by a step of any optimizer of torch: fused ones write to a weight and
    leave its version as it was. What is written through ``weight.data`` is seen by nobody, autograd included.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()  # a reference, so that no later tensor lies at the same address
        self._key = _key(weight)

    def is_of(self, weight: Tensor) -> bool:
        """Whether ``weight`` is that tensor and was not changed since."""
        return self._key == _key(weight)


def _key(weight: Tensor) -> tuple[object, ...]:
    place = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device
    return *place, weight._version, _optimizer_steps()[0]


@cache
def _optimizer_steps() -> list[int]:
    """The number of steps that optimizers have taken in this process since the first call, in a list of one."""
    steps = [0]

    def add_one(*_: object) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(add_one)
    return steps


class PackedLinear(nn.Linear):
    """The same parameters under the same names as ``linear``, and a second copy of its weight, made at the first
    forward and made anew when the weight has changed (:class:`WeightState`)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        self._layout: Tensor | None = None
        self._made_of: WeightState | None = None
        self._family: Family | None = None

    def forward(self, input: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"]:
        learns = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        alike = input.dtype == self.weight.dtype and input.numel() > 0
        if learns or not alike or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(input, self.weight, self.bias)
        if self._family is not None and (out := self._family.product(self, input)) is not None:
            return out
        if (layout := self._laid_out()) is None:
            return nn.functional.linear(input, self.weight, self.bias)
        return multiply(input, layout, self.bias)

    def join(self, family: Family) -> None:
        """Multiply with others from now on; a layout of its own is made again only where it is asked alone."""
        self._family, self._layout, self._made_of = family, None, None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is alone, and lays its weight out anew: a layout is opaque, and of the weight it was made of."""
        return self.__dict__ | {"_layout": None, "_made_of": None, "_family": None}

    def _laid_out(self) -> Tensor | None:
        """The layout of the weight as it is now; None where it has gone to a device or dtype that has none."""
        if self._made_of is None or not self._made_of.is_of(self.weight):
            self._layout, self._made_of = None, WeightState(self.weight)
            with torch.no_grad():
                self._layout = lay_out(self.weight.detach())
        return self._layout


def multiply(x: Float[Tensor, "*rows K"], layout: Tensor, bias: Float[Tensor, " M"] | None) -> Float[Tensor, "*rows M"]:
    """The product with a weight that `lay_out` has laid out."""
    return torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")


def lay_out(weight: Float[Tensor, "M K"]) -> Tensor | None:
    """The weight as oneDNN wants it, opaque; None on a device or in a dtype for which there is no layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if _takes(weight) else None


def packable(linear: nn.Linear) -> bool:
    """Whether oneDNN takes this layer's dtype on this machine: on a CPU, float32 and what the CPU multiplies itself."""
    return _takes(linear.weight)


def _takes(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return {
        torch.float32: lambda: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }.get(weight.dtype, lambda: False)()


def pack(module: nn.Module) -> int:
    """Replace every plain linear layer below ``module`` that can be packed; how many were. Costs as much memory again
    as their weights. Parameters, their names and the forward's result (but for rounding) stay."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and packable(child):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def packed(module: M) -> M:
    """Return a packed twin of ``module``, for decoding: other module objects over the very same parameters and buffers,
    so that it follows their training, and ``module`` itself stays as it is."""
    twin = _twin(module, {})
    pack(twin)
    return twin


def _twin(module: M, twins: dict[int, nn.Module]) -> M:
    """``module`` and the modules below it as new objects; one that stands in two places stays one."""
    if id(module) not in twins:
        twin = twins[id(module)] = module.__new__(type(module))
        tables = {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}
        twin.__dict__ = module.__dict__ | tables
        for name, child in tables["_modules"].items():
            twin._modules[name] = None if child is None else _twin(child, twins)
    twin = twins[id(module)]
    assert isinstance(twin, type(module))
    return twin


class Siblings(Family):
    """Layers of one dtype and input width, in the order in which they are asked.

    What the first has made for the others is held until they have asked, and then let go. A tensor that is written to
    between two of them would be read as it was before.
    """

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        self._layers = tuple(layers)
        self._place = {id(layer): i for i, layer in enumerate(layers)}
        self._widths = [layer.out_features for layer in layers]
        self._layout: Tensor | None = None
        self._bias: Tensor | None = None
        self._made_of: tuple[WeightState, ...] = ()
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def product(self, layer: PackedLinear, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows M"] | None:
        place = self._place[id(layer)]
        if place > 0:
            part = self._parts.pop(place, None) if x is self._input else None
            if not self._parts:
                self._input = None
            return part
        if (layout := self._laid_out()) is None:
            return None
        first, *others = multiply(x, layout, self._bias).split(self._widths, -1)
        self._input, self._parts = x, dict(enumerate(others, start=1))
        return first

    def _laid_out(self) -> Tensor | None:
        weights = [layer.weight for layer in self._layers]
        if not (self._made_of and all(map(WeightState.is_of, self._made_of, weights))):
            self._made_of = tuple(map(WeightState, weights))
            with torch.no_grad():
                self._layout = lay_out(torch.cat(weights))
                biases = [layer.bias for layer in self._layers]
                self._bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
        return self._layout


def join(module: nn.Module, run: Callable[[], object]) -> int:
    """Join the packed layers below ``module`` that one ``run`` asks once each, with the very same tensor; how many
    layers were joined."""
    asked: dict[int, tuple[Tensor, list[PackedLinear]]] = {}  # holds the tensors, so that no id comes twice
    times: dict[int, int] = {}

    def see(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, PackedLinear)
        times[id(layer)] = times.get(id(layer), 0) + 1
        asked.setdefault(id(given[0]), (given[0], []))[1].append(layer)

    layers = [m for m in module.modules() if isinstance(m, PackedLinear)]
    if not layers:
        return 0
    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        with torch.inference_mode():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    count = 0
    for _, together in asked.values():
        kinds = {(layer.weight.dtype, layer.bias is None) for layer in together}
        if len(together) > 1 and len(kinds) == 1 and all(times[id(layer)] == 1 for layer in together):
            family = Siblings(together)
            for layer in together:
                layer.join(family)
            count += len(together)
    return count
