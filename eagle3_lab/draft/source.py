"""Where a draft's features come from: the target's fused intermediate states (EAGLE-3) or its top state (EAGLE).

A source names the hidden states to tap and owns the projection to the draft's width, so nothing downstream asks
whether features were fused. Layer ids are Hugging Face's ``hidden_states`` indices (:mod:`eagle3_lab.types`).
"""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle3_lab.types import FeatureSource, FrozenTarget


class FusedFeature(FeatureSource):
    """Several intermediate states, joined low to high and projected to the draft's width without bias.

    ``width`` is the draft's; None: the target's. ``layers`` are strictly ascending ids within ``0 .. n`` of a target of
    n blocks. None is the official choice ``2, n//2, n-3`` where those are ascending (n >= 7), and ``1, n//2, n-1`` for
    the small targets 4 <= n < 7:

        n = 32: 2 16 29      n = 7: 2 3 4      n = 6: 1 3 5      n = 5: 1 2 4      n = 4: 1 2 3

    Raises:
        ValueError: for a width below 1; from ``layers`` and ``build``, if the target is too small for the default or an
            id is out of range, repeated or out of order.

    Source: EAGLE-3 (arXiv 2503.01840) section 3.1; SafeAILab/EAGLE cb7e084 traineagle3/modeling_llama_kv.py:1139
    (which states), traineagle3/cnets.py:501 (fc). The rule for n < 7 is ours: the official one repeats an id there.
    """

    fc: nn.Linear

    def __init__(self, layers: list[int] | None = None, width: int | None = None) -> None:
        super().__init__()
        if width is not None and width < 1:
            raise ValueError(f"features.width must be >= 1, or null for the target's, got {width}")
        self.width = width
        self.layer_ids = None if layers is None else tuple(layers)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        if self.layer_ids is None:
            return _default_layers(num_layers)
        ids = self.layer_ids
        ascending = all(low < high for low, high in itertools.pairwise(ids))
        if not ids or not ascending or ids[0] < 0 or ids[-1] > num_layers:
            raise ValueError(f"features.layers must be ascending ids within 0..{num_layers}, got {list(ids)}")
        return ids

    def build(self, target: FrozenTarget) -> int:
        width = self.width or target.spec.hidden
        self.fc = nn.Linear(len(self.layers(target.spec.layers)) * target.spec.hidden, width, bias=False)
        return width

    def forward(self, taps: tuple[Float[Tensor, "B T Dt"], ...]) -> Float[Tensor, "B T D"]:
        # the target may run in a narrower dtype than the trained projection
        return self.fc(torch.cat(taps, dim=-1).to(self.fc.weight.dtype))


class TopFeature(FeatureSource):
    """The last state after the final norm, as it is: the head's own input, D = Dt.

    Source: EAGLE (arXiv 2401.15077); SafeAILab/EAGLE cb7e084 train/main.py:171-180.
    """

    def layers(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers,)

    def build(self, target: FrozenTarget) -> int:
        return target.spec.hidden

    def forward(self, taps: tuple[Float[Tensor, "B T Dt"], ...]) -> Float[Tensor, "B T D"]:
        return taps[0]


def _default_layers(num_layers: int) -> tuple[int, int, int]:
    """See :class:`FusedFeature`."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    if num_layers >= 4:
        return 1, num_layers // 2, num_layers - 1
    raise ValueError(
        f"features.layers has no default for a target of {num_layers} layers: it lacks three distinct states between "
        f"embedding and final norm; name the ids, each within 0..{num_layers}"
    )
