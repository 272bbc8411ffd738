"""Where a draft's features come from: the target's fused intermediate states (EAGLE-3) or its top state (EAGLE).

A source names the hidden states to tap and owns the projection to the draft's width, so nothing downstream asks
whether features were fused. Layer ids are Hugging Face's ``hidden_states`` indices (:mod:`eagle3_lab.types`).
"""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor, nn

from eagle3_lab.draft.llama import RMSNorm
from eagle3_lab.interfaces import FeatureSource, FrozenTarget


class FusedFeature(FeatureSource):
    """Several intermediate states, joined low to high and projected to the draft's width without bias.

    ``width`` is the draft's; None: the target's. ``layers`` are strictly ascending ids within ``0 .. n`` of a target of
    n blocks. None is the official choice ``2, n//2, n-3`` where those are ascending (n >= 7), and ``1, n//2, n-1`` for
    the small targets 4 <= n < 7:

        n = 32: 2 16 29      n = 7: 2 3 4      n = 6: 1 3 5      n = 5: 1 2 4      n = 4: 1 2 3

    ``normed``: each state passes an RMSNorm of its own before they are joined (EAGLE-3.1), so that none drowns the
    others; the residual stream's size differs by orders of magnitude between layers and tokens.

    Raises:
        ValueError: for a width below 1; from ``layers`` and ``build``, if the target is too small for the default or an
            id is out of range, repeated or out of order.

    Source: EAGLE-3 (arXiv 2503.01840) section 3.1; SafeAILab/EAGLE cb7e084 traineagle3/modeling_llama_kv.py:1139
    (which states), traineagle3/cnets.py:501 (fc). The rule for n < 7 is ours: the official one repeats an id there.
    ``normed``: EAGLE-3.1 (arXiv 2605.09992); vllm-project/speculators c05b95b eagle3/config.py:43-96 (``fc_norm``).
    """

    fc: nn.Linear
    fc_norm: nn.ModuleList

    def __init__(self, layers: list[int] | None = None, width: int | None = None, normed: bool = False) -> None:
        super().__init__()
        if width is not None and width < 1:
            raise ValueError(f"features.width must be >= 1, or null for the target's, got {width}")
        self.width, self.normed = width, normed
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
        hidden, states = target.spec.hidden, len(self.layers(target.spec.layers))
        width = self.width or hidden
        self._read = self.layers(target.spec.layers)
        self._eps = target.spec.rms_eps
        self.fc = nn.Linear(states * hidden, width, bias=False)
        norms = [RMSNorm(hidden, target.spec.rms_eps) for _ in range(states)] if self.normed else []
        self.fc_norm = nn.ModuleList(norms)
        return width

    def forward(self, taps: tuple[Float[Tensor, "B T Dt"], ...]) -> Float[Tensor, "B T D"]:
        # the target may run in a narrower dtype than the trained projection
        states = [tap.to(self.fc.weight.dtype) for tap in taps]
        if self.normed:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        return self.fc(torch.cat(states, dim=-1))

    def options(self) -> dict[str, object]:
        found: dict[str, object] = {"layers": list(self._read), "width": self.fc.out_features, "normed": self.normed}
        return found | ({"rms_eps": self._eps} if self.normed else {})


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


class NoFeature(FeatureSource):
    """Nothing of the target's states, for a draft that reads tokens alone: nothing is tapped, D = 0."""

    def layers(self, num_layers: int) -> tuple[int, ...]:
        return ()

    def build(self, target: FrozenTarget) -> int:
        return 0

    def forward(self, taps: tuple[Float[Tensor, "B T Dt"], ...]) -> Float[Tensor, "B T D"]:
        return torch.empty(0, 0, 0)


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
