"""The draft vocabulary: which target ids a draft can say, and the map between the two numberings.

Draft id ``i`` means target id ``i + d2t[i]``: the map holds OFFSETS, as every public head does. Kept ids ascend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

OUTSIDE = -1
"""The draft id of a target id that the draft vocabulary does not hold."""


def choose(
    counts: Int[Tensor, " V"], size: int, always: Sequence[int] = (), real_vocab: int | None = None
) -> Int[Tensor, " Vd"]:
    """Pick ``size`` target ids, ascending: those in ``always``, then the most common, ties to the lower id.

    ``counts`` say how often each id occurs among supervised tokens. Where fewer than ``size`` ids occur, the lowest
    unused ones fill up. ``real_vocab`` is how many ids the tokenizer has; the head's rows behind it are padding and
    are never picked, except by ``size == V``, which keeps every row.

        choose([0 4 9 4 0 0], size=3) = [1 2 3]      choose([0 4 9 4 0 0], size=3, always=[5]) = [1 2 5]

    Raises:
        ValueError: for a size outside ``1 .. real_vocab``, more ``always`` than places, an id of ``always`` outside
            the real vocabulary, or counted tokens behind it.
    """
    rows = counts.shape[0]
    if size == rows:
        return torch.arange(rows, device=counts.device)
    real = rows if real_vocab is None else real_vocab
    wanted = sorted(set(always))
    if not 1 <= size <= real:
        raise ValueError(f"draft vocabulary size must be within 1..{real} (or {rows}: every row), got {size}")
    if len(wanted) > size:
        raise ValueError(f"draft vocabulary size must be >= {len(wanted)}, the tokens it always keeps, got {size}")
    if wanted and not 0 <= wanted[0] <= wanted[-1] < real:
        raise ValueError(f"tokens the draft vocabulary always keeps must be within 0..{real - 1}, got {wanted}")
    if bool((counts[real:] > 0).any()):
        raise ValueError(f"counted tokens must be within the real vocabulary 0..{real - 1}, got one behind it")
    rank = counts[:real].clone()
    rank[wanted] = counts.max() + 1
    common = torch.sort(rank, descending=True, stable=True).indices[:size]  # stable: equal counts keep id order
    return common.sort().values


class DraftVocab(nn.Module):
    """The map between draft ids and target ids, saved beside the weights it explains.

    Buffers: ``d2t`` int64 offsets [Vd], ``t2d`` bool [V], True at the kept ids. A state dict whose two maps disagree
    is refused when loaded.

    Raises:
        ValueError: if ``ids`` are not strictly ascending within ``0 .. vocab - 1``.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, ids: Int[Tensor, " Vd"], vocab: int) -> None:
        super().__init__()
        _refuse_unusable(ids, vocab)
        self.register_buffer("d2t", ids.long() - torch.arange(ids.shape[0], device=ids.device))
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool, device=ids.device))
        self.t2d[ids.long()] = True
        self.register_load_state_dict_post_hook(_check_after_loading)

    @classmethod
    def from_offsets(cls, d2t: Int[Tensor, " Vd"], vocab: int, t2d: Bool[Tensor, " V"] | None = None) -> DraftVocab:
        """Rebuild the map from a checkpoint's tensors.

        Raises:
            ValueError: if the ids are not unique, ascending and below ``vocab``, or disagree with ``t2d``.
        """
        check_offsets(d2t, vocab, t2d)
        return cls(d2t.long() + torch.arange(d2t.shape[0], device=d2t.device), vocab)

    def ids(self) -> Int[Tensor, " Vd"]:
        """The kept target ids, ascending."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def to_target(self, draft_ids: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """Target ids of draft ids."""
        return draft_ids + self.d2t[draft_ids]

    def from_target(self, target_ids: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """Draft ids of target ids, OUTSIDE for those the draft cannot say."""
        place = torch.where(self.t2d, self.t2d.cumsum(0) - 1, OUTSIDE)
        return place[target_ids]


def check_offsets(d2t: Int[Tensor, " Vd"], vocab: int, t2d: Bool[Tensor, " V"] | None = None) -> None:
    """Check a stored map: target = i + d2t[i], and ``t2d`` True exactly there.

    Raises:
        ValueError: saying what is wrong, and if the offsets look like absolute ids.
    """
    ids = d2t.long() + torch.arange(d2t.shape[0], device=d2t.device)
    if t2d is None:
        return _refuse_unusable(ids, vocab)
    if t2d.shape[0] != vocab:
        raise ValueError(f"t2d must have {vocab} entries, one per target id, got {t2d.shape[0]}")
    kept = t2d.nonzero().flatten()
    if torch.equal(d2t.long(), kept) and not torch.equal(ids, kept):
        raise ValueError("d2t holds absolute target ids; it must hold offsets (target = i + d2t[i])")
    _refuse_unusable(ids, vocab)
    if not torch.equal(ids, kept):
        raise ValueError("d2t and t2d disagree: arange + d2t must equal the ids where t2d is True")


def _refuse_unusable(ids: Tensor, vocab: int) -> None:
    if ids.shape[0] == 0:
        raise ValueError("the draft vocabulary is empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"draft vocabulary ids must be within 0..{vocab - 1}, got {low}..{high}")
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("draft vocabulary ids must be unique and ascending")


def _check_after_loading(module: nn.Module, _: object) -> None:
    assert isinstance(module, DraftVocab)
    check_offsets(module.d2t, module.t2d.shape[0], module.t2d)
