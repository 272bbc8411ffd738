"""The draft language model of speculative sampling (SpS), made of the target: its first blocks, between its own
embedding and its own final norm and head.

A language model trained from nothing on little data accepts almost nothing; this one speaks the target's tokens and
reads its embedding from the start, and distillation teaches its few blocks to say what the whole target says.

Source: speculative sampling: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). Distilling the draft
on text the target wrote: DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.interfaces import CausalDraft, FrozenTarget


class FirstLayers(CausalDraft):
    """The target's embedding, first ``layers`` blocks, final norm and head as a language model.

    Blocks and norm are trained. ``train_embedding``: embedding and head too (one matrix where the target ties them);
    by default they stay the target's own, and are neither trained nor kept in checkpoints. It says every target id.

    Raises:
        ValueError: for fewer than one layer; in ``build``, for more than the target has, features that nobody would
            read, or a smaller draft vocabulary.
    """

    draft_vocab: DraftVocab

    def __init__(self, layers: int, train_embedding: bool = False) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"draft.layers must be >= 1, got {layers}")
        self.count, self.train_embedding = layers, train_embedding

    def build(self, target: FrozenTarget, width: int, vocab: Int[Tensor, " Vd"]) -> None:
        spec = target.spec
        if self.count > spec.layers:
            raise ValueError(f"draft.layers must be at most the target's {spec.layers}, got {self.count}")
        if width != 0:
            raise ValueError(f"features must be NoFeature for FirstLayers, which reads tokens alone, got width {width}")
        if vocab.shape[0] not in (spec.vocab, spec.real_vocab):
            raise ValueError(
                f"draft_vocab must be null for FirstLayers, which speaks through a head of {spec.vocab} ids, "
                f"got {vocab.shape[0]}"
            )
        self.lm = target.first_layers(self.count, train_embedding=self.train_embedding)
        self.draft_vocab = DraftVocab(vocab, spec.vocab)

    def logits(self, head_in: Float[Tensor, "M H"], s: int) -> Float[Tensor, "M Vd"]:
        # without the head's padding rows, which lie behind
        return self.lm.logits(head_in)[..., : self.draft_vocab.d2t.shape[0]]

    @property
    def vocab(self) -> Int[Tensor, " Vd"]:
        return self.draft_vocab.ids()

    @property
    def num_layers(self) -> int:
        return self.count

    def options(self) -> dict[str, object]:
        return {"layers": self.count, "train_embedding": self.train_embedding}
