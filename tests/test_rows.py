"""The row convention's arithmetic: shifts, documents and the three masks, drawn by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3_lab.rows import Edge, Mask, row_weights, same_document, shift
from eagle3_lab.types import PADDING

U, A = False, True
ONE = [U, U, A, A, A]


def weights(
    supervised: list[bool], s: int, mask: Mask, edge: Edge = "dropped", document: list[int] | None = None
) -> str:
    """One row's weights as a drawing."""
    where = [0] * len(supervised) if document is None else document
    found = row_weights(torch.tensor([supervised]), torch.tensor([where]), s, mask, edge)
    assert found.dtype == torch.float32
    return " ".join(str(int(w)) for w in found[0])


# --------------------------------------------------------------------------------------------------------- shifting


def test_shift_moves_rows_forward_in_time_and_fills_the_end() -> None:
    x = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert shift(x, 0).tolist() == x.tolist()
    assert shift(x, 1).tolist() == [[2, 3, 4, 0], [6, 7, 8, 0]]
    assert shift(x, 3, PADDING).tolist() == [[4, -1, -1, -1], [8, -1, -1, -1]]


@pytest.mark.parametrize("by", [4, 5, 100])
def test_a_shift_past_the_end_is_all_fill(by: int) -> None:
    assert shift(torch.ones(1, 4), by, 7.0).tolist() == [[7.0] * 4]


def test_shift_keeps_what_lies_behind_the_row_axis_and_the_dtype() -> None:
    x = torch.arange(6.0).reshape(1, 3, 2)
    assert shift(x, 1).tolist() == [[[2, 3], [4, 5], [0, 0]]]
    assert shift(torch.tensor([[True, False]]), 1, True).tolist() == [[False, True]]


def test_rows_of_one_document_are_told_from_neighbours_and_from_padding() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, PADDING, PADDING]])
    assert same_document(document, 0).int().tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert same_document(document, 1).int().tolist() == [[1, 1, 0, 1, 0, 0, 0]]
    assert same_document(document, 2).int().tolist() == [[1, 0, 0, 0, 0, 0, 0]]


# ------------------------------------------------------------------------------------------------------- the masks


def test_drafted_rows_are_those_a_decoder_could_draft_at() -> None:
    assert weights(ONE, 0, "drafted") == "0 1 1 0 0"
    assert weights(ONE, 1, "drafted") == "0 1 0 0 0"
    assert weights(ONE, 2, "drafted") == "0 0 0 0 0"


def test_official_rows_move_back_with_the_step_and_leave_out_the_last_token() -> None:
    assert weights(ONE, 0, "official") == "0 0 1 1 0"
    assert weights(ONE, 1, "official") == "0 1 1 0 0"
    assert weights(ONE, 2, "official") == "1 1 0 0 0"


def test_the_counted_edge_adds_the_row_without_a_teacher_and_nothing_else() -> None:
    assert weights(ONE, 0, "official", "counted") == "0 0 1 1 1"
    assert weights(ONE, 1, "official", "counted") == "0 1 1 1 0"
    assert weights(ONE, 2, "official", "counted") == "1 1 1 0 0"


def test_root_rows_are_those_whose_root_the_target_wrote() -> None:
    assert weights(ONE, 0, "root") == "0 1 1 1 0"
    assert weights(ONE, 1, "root") == "1 1 1 0 0"
    assert weights(ONE, 2, "root") == "1 1 0 0 0"


def test_the_edge_is_of_no_matter_to_the_other_masks() -> None:
    for mask in ("drafted", "root"):
        assert weights(ONE, 1, mask, "counted") == weights(ONE, 1, mask, "dropped")


def test_no_row_of_one_document_is_weighed_by_the_next_ones_tokens() -> None:
    """Two documents, u A A | u A A, and padding: every mask is that of each alone."""
    two, document = [U, A, A, U, A, A, U], [0, 0, 0, 1, 1, 1, PADDING]
    assert weights(two, 0, "drafted", document=document) == "1 0 0 1 0 0 0"
    assert weights(two, 0, "official", document=document) == "0 1 0 0 1 0 0"
    assert weights(two, 0, "official", "counted", document=document) == "0 1 1 0 1 1 0"
    assert weights(two, 1, "official", document=document) == "1 0 0 1 0 0 0"
    assert weights(two, 0, "root", document=document) == "1 1 0 1 1 0 0"
    assert weights(two, 2, "root", document=document) == "0 0 0 0 0 0 0"


def test_an_answer_that_opens_its_document_is_drafted_from_its_first_token_on() -> None:
    """Row 2 is the last of the first document: it may not read the second one's answer."""
    assert weights([U, A, A, A, A, A], 0, "drafted", document=[0, 0, 0, 1, 1, 1]) == "1 0 0 1 0 0"


def test_drafts_do_not_reach_over_a_turn_of_the_user() -> None:
    """Two answers in one document: u A A u A A A."""
    turns = [U, A, A, U, A, A, A]
    assert weights(turns, 0, "drafted") == "1 0 0 1 1 0 0"
    assert weights(turns, 1, "drafted") == "0 0 0 1 0 0 0"
    assert weights(turns, 0, "official") == "0 1 1 0 1 1 0"  # row 2 teaches the user's turn: m[t] alone decides
    assert weights(turns, 1, "root") == "1 0 1 1 1 0 0"  # row 2 reads the user's x[3]: m[t+2] alone decides


def test_steps_beyond_the_text_weigh_nothing() -> None:
    for mask in ("drafted", "official", "root"):
        assert weights(ONE, 6, mask, "counted") == "0 0 0 0 0"


# ------------------------------------------------------------------------------------------------------- a law


def plainly(supervised: list[bool], document: list[int], t: int, s: int, mask: Mask, edge: Edge) -> bool:
    """The definitions, read token by token."""

    def own(i: int) -> bool:
        return i < len(document) and document[i] == document[t] != PADDING

    def said(i: int) -> bool:
        return own(i) and supervised[i]

    if mask == "drafted":
        return own(t) and all(said(i) for i in range(t + 1, t + 3 + s))
    if mask == "official":
        return said(t + s) and (edge == "counted" or own(t + 1 + s))
    return said(t + 1 + s)


@pytest.mark.parametrize("seed", range(4))
def test_every_mask_is_its_definition_on_random_rows(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (4,), generator=draw).tolist()
    document = [number for number, length in enumerate(lengths) for _ in range(length)] + [PADDING] * 3
    supervised: Tensor = torch.rand(len(document), generator=draw) < 0.7
    said = (supervised & (torch.tensor(document) != PADDING)).tolist()
    for s in range(4):
        for mask, edge in (
            ("drafted", "dropped"),
            ("official", "dropped"),
            ("official", "counted"),
            ("root", "dropped"),
        ):
            expected = [plainly(said, document, t, s, mask, edge) for t in range(len(document))]
            assert weights(said, s, mask, edge, document) == " ".join(str(int(w)) for w in expected), (mask, edge, s)
