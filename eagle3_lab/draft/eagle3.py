"""The EAGLE-3 draft head.

Step s of row t: the embedding of token x[t+1+s] and the carry, each normed, side by side into the first layer's
q, k, v; the un-normed carry is the residual; the un-normed output is the next carry; ``norm``, then the draft's own
head over the draft vocabulary. The embedding is the target's, frozen, and no parameter of the draft, unless the draft
is of another width.

Source: EAGLE-3 (arXiv 2503.01840); SafeAILab/EAGLE cb7e084 traineagle3/cnets.py:201-203, 380-439, 847-851.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3_lab.backend.compile import fusible
from eagle3_lab.draft.embedding import Embedding, TokenEmbedding
from eagle3_lab.draft.llama import Angles, Body, DecoderLayer, RMSNorm, SelfAttention, after_attention
from eagle3_lab.draft.lm_head import HeadStart, check_start, make_head
from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.interfaces import Context, DraftModel, FrozenTarget
from eagle3_lab.types import Carry, DraftOut, Rotary, Rows


class FusingLayer(DecoderLayer):
    """EAGLE-3's first layer: attention reads the token's embedding and the carry side by side, embedding first.

    ``input_layernorm`` norms the embedding, ``hidden_norm`` the carry; the residual is the carry, un-normed.
    """

    def __init__(self, attention: SelfAttention, width: int, intermediate: int, eps: float) -> None:
        super().__init__(attention, width, intermediate, eps)
        self.hidden_norm = RMSNorm(width, eps)

    def fuse(
        self,
        embedding: Float[Tensor, "B T D"],
        hidden: Float[Tensor, "B T D"],
        angles: Angles,
        rows: Rows,
        context: Context,
    ) -> Float[Tensor, "B T D"]:
        q, k, v = _read_both(self, embedding, hidden, angles)
        return after_attention(self, hidden, context.attend(self.self_attn.index, q, k, v, rows))


@fusible("few")
def _read_both(layer: FusingLayer, embedding: Tensor, hidden: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """A fusing layer up to its attention."""
    both = torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(hidden)), dim=-1)
    return layer.self_attn.read(both, angles)


class Eagle3(DraftModel):
    """The EAGLE-3 head: a fusing layer, then ``num_layers - 1`` ordinary ones, norm, and a head of Vd rows.

    Sizes left None are the target's own; the width is the features'. ``head`` says how the head's rows begin: "target"
    copies the target's rows of the draft vocabulary and trains them, "frozen" copies and keeps them, "random" trains
    from scratch (official). ``embedding`` says what embeds the tokens: "target" is the target's own, frozen; a draft of
    another width has either a trained projection of that one ("projected") or a table of its own ("own", as public
    heads of another width). ``rope_base`` None is the target's own rotary embedding; a number is the plain one of that
    base (the official training code uses 10000 whatever the target's configuration says). ``feedback`` is what the next
    step reads of this one: its output as it is ("pre_norm", official), or what the head reads ("post_norm", EAGLE-3.1).

    Raises:
        ValueError: for sizes that do not fit, at construction or, where the target decides, in ``build``.

    Source: SafeAILab/EAGLE cb7e084 traineagle3/cnets.py; "frozen": vllm-project/speculators c05b95b model.py:66-77;
    "post_norm": EAGLE-3.1 (arXiv 2605.09992), speculators core.py:302-306.
    """

    embed: TokenEmbedding
    layers: nn.ModuleList
    norm: RMSNorm
    lm_head: nn.Linear
    draft_vocab: DraftVocab

    def __init__(
        self,
        num_layers: int = 1,
        intermediate: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        head: HeadStart = "target",
        rope_base: float | None = None,
        embedding: Embedding = "target",
        rms_eps: float | None = None,
        feedback: Literal["pre_norm", "post_norm"] = "pre_norm",
    ) -> None:
        super().__init__()
        self.body = Body(num_layers, intermediate, heads, kv_heads, head_dim, rope_base, rms_eps)
        if feedback not in ("pre_norm", "post_norm"):
            raise ValueError(f"draft.feedback must be one of pre_norm, post_norm, got {feedback!r}")
        self.feedback = feedback
        check_start(head)
        self.head: HeadStart = head
        self.embedding: Embedding = embedding

    def build(self, target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"]) -> None:
        spec, body = target.spec, self.body.fit(target)
        if self.head != "random" and width != spec.hidden:
            raise ValueError(
                f"draft.head must be random for a draft of width {width}: the rows of the target's head are "
                f"{spec.hidden} wide, got {self.head!r}"
            )
        self.embed = TokenEmbedding(self.embedding, target, width)
        self.layers = nn.ModuleList()
        for index in range(body.num_layers):
            kind, reads = (FusingLayer, 2 * width) if index == 0 else (DecoderLayer, width)
            self.layers.append(
                kind(SelfAttention.of(body, index, reads, width), width, body.intermediate, body.rms_eps)
            )
        self.norm = RMSNorm(width, body.rms_eps)
        self.draft_vocab = DraftVocab(vocab, spec.vocab)
        self.lm_head = make_head(target, width, vocab, self.head)
        self._body, self._angles = body, body.angles

    def start(self, features: Float[Tensor, "B T D"]) -> Carry:
        # the residual stream keeps the parameters' dtype: float32 under autocast, too
        return features.to(self.norm.weight.dtype)

    def step(self, carry: Carry, ids: Int[Tensor, "B T"], rows: Rows, s: int, context: Context) -> DraftOut:
        assert isinstance(carry, Tensor)
        angles = self._angles(rows.position)
        embedding = self.embed(ids).to(carry.dtype)
        first, *others = self.layers
        assert isinstance(first, FusingLayer)
        hidden = first.fuse(embedding, carry, angles, rows, context)
        for layer in others:
            hidden = layer(hidden, angles, rows, context)
        head_in = self.norm(hidden)
        return DraftOut(head_in=head_in, carry=hidden if self.feedback == "pre_norm" else head_in)

    def logits(self, head_in: Float[Tensor, "M H"], s: int) -> Float[Tensor, "M Vd"]:
        return self.lm_head(head_in)

    @property
    def vocab(self) -> Int[Tensor, " Vd"]:
        return self.draft_vocab.ids()

    @property
    def num_layers(self) -> int:
        return self.body.num_layers

    def options(self) -> dict[str, object]:
        return self._body.options() | {"embedding": self.embedding, "feedback": self.feedback}

    @property
    def rotary(self) -> Rotary:
        """What turns its queries and keys, once built."""
        return self._angles.rotary
