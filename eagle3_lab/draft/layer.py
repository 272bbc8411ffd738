"""The EAGLE-3 draft head, and the decoder layer that other heads share with it.

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

from eagle3_lab.draft.attention import rotate
from eagle3_lab.draft.body import Body, FittedBody
from eagle3_lab.draft.embedding import Embedding, TokenEmbedding
from eagle3_lab.draft.head import HeadStart, check_start, make_head
from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.fusing import fusible
from eagle3_lab.types import Carry, Context, DraftModel, DraftOut, FrozenTarget, Rotary, Rows

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of the rows' rope angles, [B, T, d] each, shared by all layers of a step."""


class RMSNorm(nn.Module):
    """x / rms(x) times a learned weight; computed in float32 (float64 stays), returned in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention over whatever keys the context holds; q, k, v read ``reads`` wide rows."""

    def __init__(self, index: int, reads: int, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.index, self.head_dim = index, head_dim
        self.q_proj = nn.Linear(reads, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(reads, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(reads, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    @staticmethod
    def of(body: FittedBody, index: int, reads: int, width: int) -> SelfAttention:
        """The attention of layer ``index``."""
        return SelfAttention(index, reads, width, body.heads, body.kv_heads, body.head_dim)

    def read(self, x: Float[Tensor, "B T reads"], angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, T, d), keys and values (B, kv_heads, T, d), the first two turned."""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, *angles), rotate(k, *angles), v

    def write(self, attended: Float[Tensor, "B heads T d"]) -> Float[Tensor, "B T D"]:
        """What the heads say together."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # not unflatten, which torch's compiler cannot look through while a LinearMode is active
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)  # (B, heads, T, d)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Llama's layer: attention on the normed stream, then SwiGLU on it, each added to the un-normed stream.

    ``normed`` False: attention reads the stream as it is, and there is no ``input_layernorm`` weight.
    """

    def __init__(
        self, attention: SelfAttention, width: int, intermediate: int, eps: float, normed: bool = True
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps) if normed else nn.Identity()
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, intermediate)

    def forward(
        self, hidden: Float[Tensor, "B T D"], angles: Angles, rows: Rows, context: Context
    ) -> Float[Tensor, "B T D"]:
        q, k, v = _read(self, hidden, angles)
        return _after(self, hidden, context.attend(self.self_attn.index, q, k, v, rows))


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
        return _after(self, hidden, context.attend(self.self_attn.index, q, k, v, rows))


@fusible("few")
def _read(layer: DecoderLayer, hidden: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """A layer up to its attention."""
    return layer.self_attn.read(layer.input_layernorm(hidden), angles)


@fusible("few")
def _read_both(layer: FusingLayer, embedding: Tensor, hidden: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """A fusing layer up to its attention."""
    both = torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(hidden)), dim=-1)
    return layer.self_attn.read(both, angles)


@fusible("few")
def _after(layer: DecoderLayer, residual: Tensor, attended: Tensor) -> Tensor:
    """The rest of a layer, once attention has spoken."""
    hidden = residual + layer.self_attn.write(attended)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


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
