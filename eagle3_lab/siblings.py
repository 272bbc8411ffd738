"""Linear layers that read the very same tensor, multiplied as one: fewer products, and larger ones.

A decoder block asks its query, key and value layers for the same rows one after another, and its gate and up layers
too. Each product of few rows on a CPU has a price of its own beside its bytes; laid out as one weight they pay it once.
The first of them multiplies for all, the others take what is theirs. Who they are is seen in a run of the model itself,
so no family's names are known here, and a layer that is asked with another tensor multiplies alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle3_lab.packed import Family, PackedLinear, WeightState, lay_out, multiply


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
