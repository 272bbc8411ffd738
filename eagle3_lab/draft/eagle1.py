"""The EAGLE head: predicts the target's next feature and speaks through the target's own head. HASS trains it too.

Step s of row t: the embedding of token x[t+1+s] and the carry, side by side, embedding first, through one linear map
without activation; then Llama layers, the first without its input norm; no final norm. The output is the predicted
feature: it is what the head reads, what a feature loss compares with the target's, and what the next step is fed.
Embedding and head are the target's, frozen, and no parameters of the draft.

Source: EAGLE (arXiv 2401.15077); SafeAILab/EAGLE cb7e084 eagle/model/cnets1.py:392-456, 480-528, 621-623.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.draft.llama import Body, DecoderLayer, SelfAttention
from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.interfaces import Context, DraftModel, FrozenTarget
from eagle3_lab.types import Carry, DraftOut, Rotary, Rows


class Eagle1(DraftModel):
    """The EAGLE head: ``fc``, then ``num_layers`` layers, no norm and no head of its own.

    Sizes left None are the target's own. ``bias`` is ``fc``'s. ``rope_base`` None is the target's own rotary
    embedding, a number the plain one of that base. It says every target id, the head's padding rows left out: a smaller
    draft vocabulary is refused, since the target's head is a function of the feature (bias, scale, soft cap).

    Raises:
        ValueError: for sizes that do not fit, at construction or, where the target decides, in ``build``.

    Source: SafeAILab/EAGLE cb7e084 eagle/model/cnets1.py; bias: eagle/model/ea_model.py:51-54 (True where the
    checkpoint's configuration does not say).
    """

    fc: nn.Linear
    layers: nn.ModuleList
    draft_vocab: DraftVocab

    def __init__(
        self,
        num_layers: int = 1,
        bias: bool = True,
        intermediate: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_base: float | None = None,
    ) -> None:
        super().__init__()
        self.body = Body(num_layers, intermediate, heads, kv_heads, head_dim, rope_base)
        self.bias = bias

    def build(self, target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"]) -> None:
        spec, body = target.spec, self.body.fit(target)
        if width != spec.hidden:
            raise ValueError(
                f"features.width must be null for Eagle1, which speaks through the target's own head of width "
                f"{spec.hidden}, got {width}"
            )
        if vocab.shape[0] not in (spec.vocab, spec.real_vocab):
            raise ValueError(
                f"draft_vocab must be null for Eagle1, which speaks through the target's own head of {spec.vocab} ids, "
                f"got {vocab.shape[0]}"
            )
        self.fc = nn.Linear(2 * width, width, bias=self.bias)
        self.layers = nn.ModuleList()
        for index in range(body.num_layers):
            attention = SelfAttention.of(body, index, width, width)
            self.layers.append(DecoderLayer(attention, width, body.intermediate, body.rms_eps, normed=index > 0))
        self.draft_vocab = DraftVocab(vocab, spec.vocab)
        self._body, self._angles = body, body.angles
        self._target = (target,)  # in a tuple, so that no module ever counts the target's weights as the draft's
        self._head_dtype = target.head_rows(vocab[:1]).dtype

    def start(self, features: Float[Tensor, "B T D"]) -> Carry:
        # the residual stream keeps the parameters' dtype: float32 under autocast, too
        return features.to(self.fc.weight.dtype)

    def step(self, carry: Carry, ids: Int[Tensor, "B T"], rows: Rows, s: int, context: Context) -> DraftOut:
        assert isinstance(carry, Tensor)
        angles = self._angles(rows.position)
        embedding = self._target[0].embed(ids).to(carry.dtype)
        hidden = self.fc(torch.cat((embedding, carry), dim=-1)).to(carry.dtype)
        for layer in self.layers:
            hidden = layer(hidden, angles, rows, context)
        return DraftOut(head_in=hidden, carry=hidden)

    def logits(self, head_in: Float[Tensor, "M H"], s: int) -> Float[Tensor, "M Vd"]:
        every = self._target[0].logits(head_in.to(self._head_dtype))
        return every[..., : self.draft_vocab.d2t.shape[0]]  # without the head's padding rows, which lie behind

    @property
    def vocab(self) -> Int[Tensor, " Vd"]:
        return self.draft_vocab.ids()

    @property
    def num_layers(self) -> int:
        return self.body.num_layers

    @property
    def rotary(self) -> Rotary:
        """What turns its queries and keys, once built."""
        return self._angles.rotary

    def options(self) -> dict[str, object]:
        return self._body.options() | {"bias": self.bias}
