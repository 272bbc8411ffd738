"""The draft vocabulary: who is chosen, and the two numberings' map."""

from __future__ import annotations

import pytest
import torch

from eagle3_lab.draft.vocab import DraftVocab, choose


def counts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_the_most_common_ids_are_chosen_ties_to_the_lower_id() -> None:
    assert choose(counts(0, 4, 9, 4, 0, 4), 3).tolist() == [1, 2, 3]


def test_tokens_that_are_always_kept_displace_the_least_common() -> None:
    assert choose(counts(0, 4, 9, 4, 0, 0), 3, always=[5, 2]).tolist() == [1, 2, 5]


def test_too_few_seen_ids_are_filled_up_with_the_lowest_unused_real_ids() -> None:
    assert choose(counts(0, 0, 7, 0, 0, 0), 4, always=[4], real_vocab=5).tolist() == [0, 1, 2, 4]


def test_a_vocabulary_of_every_row_is_the_identity_padding_rows_included() -> None:
    chosen = choose(counts(0, 1, 0, 0), 4, real_vocab=3)
    vocab = DraftVocab(chosen, 4)
    assert chosen.tolist() == [0, 1, 2, 3]
    assert vocab.d2t.tolist() == [0, 0, 0, 0]
    assert vocab.t2d.tolist() == [True] * 4


def test_choosing_the_real_vocabulary_leaves_padding_rows_out() -> None:
    assert choose(counts(0, 1, 0, 0), 3, real_vocab=3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (0, [], r"size must be within 1\.\.3 \(or 4: every row\), got 0"),
        (5, [], r"got 5"),
        (1, [0, 1], r"size must be >= 2, the tokens it always keeps, got 1"),
        (2, [3], r"always keeps must be within 0\.\.2, got \[3\]"),
        (2, [-1], r"got \[-1\]"),
    ],
)
def test_impossible_choices_are_refused(size: int, always: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(counts(1, 1, 1, 0), size, always=always, real_vocab=3)


def test_counts_behind_the_real_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="counted tokens must be within the real vocabulary 0..2"):
        choose(counts(1, 1, 1, 1), 2, real_vocab=3)


def test_the_map_holds_offsets() -> None:
    vocab = DraftVocab(torch.tensor([5, 9, 13]), 16)
    assert vocab.d2t.dtype == torch.int64
    assert vocab.d2t.tolist() == [5, 8, 11]
    assert vocab.t2d.dtype == torch.bool
    assert vocab.t2d.nonzero().flatten().tolist() == [5, 9, 13]
    assert torch.equal(torch.arange(3) + vocab.d2t, vocab.t2d.nonzero().flatten())
    assert vocab.ids().tolist() == [5, 9, 13]


def test_ids_go_over_and_back() -> None:
    vocab = DraftVocab(torch.tensor([5, 9, 13]), 16)
    assert vocab.to_target(torch.tensor([[2, 0], [1, 1]])).tolist() == [[13, 5], [9, 9]]
    assert vocab.from_target(torch.tensor([4, 5, 9, 15, 13])).tolist() == [-1, 0, 1, -1, 2]


def test_a_stored_map_is_rebuilt() -> None:
    whole = DraftVocab(torch.tensor([5, 9, 13]), 16)
    assert DraftVocab.from_offsets(whole.d2t, 16, whole.t2d).ids().tolist() == [5, 9, 13]
    assert DraftVocab.from_offsets(whole.d2t, 16).t2d.tolist() == whole.t2d.tolist()


@pytest.mark.parametrize(
    ("d2t", "kept", "message"),
    [
        ([5, 9, 13], [5, 9, 13], "absolute target ids"),
        ([5, 8, 11], [5, 9, 12], "disagree"),
        ([5, 8, 11], [5, 9], "disagree"),
        ([5, 8, 14], [5, 9, 15], r"within 0\.\.15, got 5\.\.16"),
        ([5, 4, 11], [5, 13], "unique and ascending"),
        ([-1, 4, 11], [5, 13], r"within 0\.\.15, got -1\.\."),
    ],
)
def test_a_map_that_lies_is_refused(d2t: list[int], kept: list[int], message: str) -> None:
    t2d = torch.zeros(16, dtype=torch.bool)
    t2d[kept] = True
    with pytest.raises(ValueError, match=message):
        DraftVocab.from_offsets(torch.tensor(d2t), 16, t2d)


def test_a_map_of_another_target_or_an_empty_one_is_refused() -> None:
    whole = DraftVocab(torch.tensor([5, 9, 13]), 16)
    with pytest.raises(ValueError, match="t2d must have 20 entries"):
        DraftVocab.from_offsets(whole.d2t, 20, whole.t2d)
    with pytest.raises(ValueError, match="empty"):
        DraftVocab(torch.tensor([], dtype=torch.int64), 16)


def test_a_state_dict_with_disagreeing_maps_is_refused_and_a_true_one_replaces_the_map() -> None:
    vocab, other = DraftVocab(torch.tensor([5, 9, 13]), 16), DraftVocab(torch.tensor([0, 1, 15]), 16)
    vocab.load_state_dict(other.state_dict())
    assert vocab.from_target(torch.tensor([15, 5])).tolist() == [2, -1]
    with pytest.raises(ValueError, match="disagree"):
        vocab.load_state_dict({"d2t": torch.tensor([5, 8, 11]), "t2d": other.t2d})
