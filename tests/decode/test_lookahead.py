"""Lookahead: what its window sees, what its pool keeps, and that neither changes any text."""

from __future__ import annotations

from collections.abc import Sequence

import decode_toys
import pytest
import torch
from decode_toys import PROMPTS, VOCAB, ToyTarget, greedy, run, seeded, table
from random_targets import random_target
from test_loop_sampling import LAW, LOGITS, p_value
from torch import Tensor

from eagle3_lab.decode.loop import decode, room
from eagle3_lab.decode.methods import Lookahead as LookaheadMethod
from eagle3_lab.decode.propose.lookahead import Lookahead
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.trees import cut
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.interfaces import Proposer
from eagle3_lab.types import PADDING, Decoded, Needs, TargetOut, Tree, Verdict

TOY = table(VOCAB, 0)


def begun(proposer: Lookahead, prompts: Sequence[Sequence[int]]) -> Lookahead:
    lengths = torch.tensor([len(p) for p in prompts])
    ids = torch.full((len(prompts), int(lengths.max())), 99)  # what pads a prompt must never be drawn
    for b, p in enumerate(prompts):
        ids[b, : len(p)] = torch.tensor(p)
    proposer.start(ids, lengths, TargetOut(), ids.shape[1] + 50, [seeded(b) for b in range(len(prompts))])
    return proposer


def says(tree: Tree, likeliest: Sequence[Sequence[int]], vocab: int = 30) -> TargetOut:
    """The target's likeliest token at the first nodes of each row; 0 at all others."""
    logits = torch.zeros(*tree.tokens.shape, vocab)
    for b, tokens in enumerate(likeliest):
        logits[b, range(len(tokens)), list(tokens)] = 1.0
    return TargetOut(logits=logits)


def plain(bonus: Sequence[int]) -> Verdict:
    """Nothing accepted, in any row."""
    rows = len(bonus)
    return Verdict(torch.zeros(rows, 1, dtype=torch.long), torch.zeros(rows, dtype=torch.long), torch.tensor(bonus))


def drafts(tree: Tree, row: int = 0) -> set[tuple[int, ...]]:
    """All paths of candidates from below the root to a leaf."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    nodes = [i for i in range(1, len(parents)) if tree.candidate[row, i]]
    assert len({(parents[i], tokens[i]) for i in nodes}) == len(nodes), "a candidate is scored twice"
    found = set()
    for leaf in (i for i in nodes if i not in {parents[k] for k in nodes}):
        path, node = [], leaf
        while node:
            path.append(tokens[node])
            node = parents[node]
        found.add(tuple(reversed(path)))
    return found


class Shadowed(Lookahead):
    """Checks every round against window and pool as plain lists, as the paper's figure has them."""

    def start(self, prompt: Tensor, lengths: Tensor, out: TargetOut, capacity: int,
              generators: Sequence[torch.Generator]) -> None:  # fmt: skip
        super().start(prompt, lengths, out, capacity, generators)
        self.texts = [set(p[:n].tolist()) for p, n in zip(prompt, lengths, strict=True)]
        self.expected: list[list[list[int | None]]] = [[[None] * self._columns] for _ in prompt]  # None: drawn
        self.pools: list[dict[int, list[tuple[int, ...]]]] = [{} for _ in prompt]
        self.tried = self.moved = 0

    def propose(self, root: Tensor) -> Tree:
        tree = super().propose(root)
        for b, levels in enumerate(self.expected):
            size = len(levels) * self._columns
            real = [p != PADDING for p in tree.parents[b, : self._levels * self._columns].tolist()]
            assert real == [True] * size + [False] * (self._levels * self._columns - size)
            assert not tree.candidate[b, 1:size].any()
            seen = iter(tree.tokens[b, :size].tolist())
            for level, tokens in enumerate(levels):
                for column, token in enumerate(tokens):
                    shown = next(seen)
                    if level == column == 0:
                        assert shown == root[b]
                    elif token is None:
                        assert shown in self.texts[b]
                    else:
                        assert shown == token, (b, level, column)
                    tokens[column] = shown
            assert drafts(tree, b) == set(self.pools[b].get(int(root[b]), []))
            self.tried += len(drafts(tree, b))
        return tree

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        assert out.logits is not None
        before = self.expected
        super().observe(tree, verdict, out)
        self.expected = []
        for b, levels in enumerate(before):
            last = (len(levels) - 1) * self._columns
            said = out.logits[b, last : last + self._columns].argmax(-1).tolist()
            ended = bool(verdict.path[b, 0] == PADDING)
            fills = len(levels) < self._levels
            for column in range(0 if fills or ended else self._columns):
                if tree.parents[b, last + column] == PADDING:
                    continue
                first, *rest = [*(level[column] for level in levels), said[column]]
                assert first is not None
                kept = [gram for gram in self.pools[b].get(first, []) if gram != tuple(rest)]
                self.pools[b][first] = [*kept, tuple(int(t or 0) for t in rest)][-self._guesses :]
            said = [None if token in self._end_tokens else token for token in said]
            step = 1 if fills else int(verdict.length[b].clamp(min=0)) if self._follows else 0
            self.moved += step if not fills else 0
            rows = [*levels, said] if fills else [*levels[1:], said]
            self.expected.append([[*row[step:], *[None] * step][: self._columns] for row in rows])


# ------------------------------------------------------------------------------------------------------ by hand


def test_a_window_token_sees_level_0_up_to_its_column_and_its_own_column() -> None:
    proposer = begun(Lookahead(window=3, ngram=4, guesses=1), [[5, 6]])
    for root in (7, 8):
        tree = proposer.propose(torch.tensor([root]))
        proposer.observe(tree, plain([root + 1]), says(tree, [[]]))
    tree = proposer.propose(torch.tensor([9]))
    visible = [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],  # the root, column 0 of level 0
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0, 0],  # level 1
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 1, 0, 0],  # level 2
        [1, 1, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ]
    assert tree.visible()[0, :9, :9].long().tolist() == visible
    assert tree.depth()[0, :9].tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]  # column + level
    assert tree.candidate[0].tolist() == [True] + [False] * 11
    assert tree.parents[0, 9:].tolist() == [PADDING] * 3  # nothing is known of what follows 9
    assert tree.tokens.shape[1] == proposer.nodes == (3 + 1) * (4 - 1)


def test_levels_are_filled_one_a_round_and_the_columns_become_n_grams() -> None:
    proposer = begun(Lookahead(window=2, ngram=3, guesses=2), [[5]])
    tree = proposer.propose(torch.tensor([10]))
    assert tree.tokens[0].tolist() == [10, 5, 0, 0, 0, 0, 0, 0]
    assert tree.parents[0].tolist() == [0, 0, *[PADDING] * 6]
    proposer.observe(tree, plain([11]), says(tree, [[21, 22]]))
    tree = proposer.propose(torch.tensor([11]))  # one position on: 22, said after 5, continues 11
    assert tree.tokens[0, :4].tolist() == [11, 5, 22, 5]
    assert tree.parents[0, :4].tolist() == [0, 0, 0, 1]
    proposer.observe(tree, plain([12]), says(tree, [[0, 0, 23, 24]]))  # 11 22 23 and 5 5 24
    tree = proposer.propose(torch.tensor([12]))
    assert tree.tokens[0, :4].tolist() == [12, 5, 23, 24]
    assert drafts(tree) == set()
    assert drafts(proposer.propose(torch.tensor([11]))) == {(22, 23)}
    assert drafts(proposer.propose(torch.tensor([5]))) == {(5, 24)}


def test_accepted_drafts_move_the_columns_on_only_where_they_follow() -> None:
    for follows, expected in ((False, [12, 32, 33, 41, 42, 43]), (True, [12, 33, 5, 42, 43, 5])):
        proposer = begun(Lookahead(window=3, ngram=3, guesses=1, follows=follows), [[5]])
        tree = proposer.propose(torch.tensor([10]))
        proposer.observe(tree, plain([11]), says(tree, [[]]))
        proposer._window = torch.tensor([[[11, 21, 22], [31, 32, 33]]])
        tree = proposer.propose(torch.tensor([11]))
        one = Verdict(torch.tensor([[0, 6]]), torch.tensor([1]), torch.tensor([12]))
        proposer.observe(tree, one, says(tree, [[0, 0, 0, 41, 42, 43]], vocab=50))
        assert proposer.propose(torch.tensor([12])).tokens[0, :6].tolist() == expected


def pool(proposer: Lookahead, grams: Sequence[Sequence[int]]) -> None:
    proposer._remember(torch.tensor([grams]), torch.ones(1, len(grams), dtype=torch.bool))


def test_the_pool_drops_the_longest_unseen_n_gram_of_a_first_token() -> None:
    proposer = begun(Lookahead(window=2, ngram=3, guesses=2), [[5]])
    pool(proposer, [[1, 2, 3], [1, 4, 5]])
    assert drafts(proposer.propose(torch.tensor([1]))) == {(2, 3), (4, 5)}
    pool(proposer, [[1, 2, 3], [7, 2, 3]])  # seen again: 4 5 is now the older one
    pool(proposer, [[1, 6, 6], [7, 8, 8]])
    assert drafts(proposer.propose(torch.tensor([1]))) == {(2, 3), (6, 6)}
    assert drafts(proposer.propose(torch.tensor([7]))) == {(2, 3), (8, 8)}
    pool(proposer, [[1, 9, 9], [1, 9, 9]])  # twice in one round is once
    assert drafts(proposer.propose(torch.tensor([1]))) == {(6, 6), (9, 9)}
    assert drafts(proposer.propose(torch.tensor([3]))) == set()


def test_n_grams_with_a_common_beginning_share_its_nodes() -> None:
    proposer = begun(Lookahead(window=3, ngram=4, guesses=3), [[5]])
    pool(proposer, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 4]])
    tree = proposer.propose(torch.tensor([1]))
    assert drafts(tree) == {(2, 3, 4), (2, 3, 5), (2, 6, 4)}
    assert tree.candidate[0].sum() == 1 + 6


def test_a_window_token_that_equals_a_guess_stays_out_of_it() -> None:
    proposer = begun(Lookahead(window=2, ngram=2, guesses=1), [[5]])
    pool(proposer, [[1, 5], [2, 2]])
    tree = proposer.propose(torch.tensor([1]))
    assert tree.tokens[0].tolist() == [1, 5, 5]
    assert (tree.parents[0].tolist(), tree.candidate[0].tolist()) == ([0, 0, 0], [True, False, True])


def test_a_window_token_past_the_context_completes_no_n_gram() -> None:
    proposer = begun(Lookahead(window=2, ngram=2, guesses=1), [[5]])
    tree = cut(proposer.propose(torch.tensor([1])), torch.tensor([0]))
    proposer.observe(tree, plain([2]), says(tree, [[8, 9]]))
    assert drafts(proposer.propose(torch.tensor([1]))) == {(8,)}
    assert drafts(proposer.propose(torch.tensor([5]))) == set()


@pytest.mark.parametrize(
    ("options", "words"),
    [((0, 5, 7), "window must be >= 1, got 0"), ((7, 1, 7), "ngram must lie in 2 .. 293 with window 7 and guesses 7"),
     ((7, 5, 0), "guesses must be >= 1, got 0"),
     ((10**9, 5, 7), "window must be at most 512, got 1000000000"),
     ((7, 5, 10**9), "guesses must be at most 512, got 1000000000"),
     ((7, 10**9, 7), "ngram must lie in 2 .. 293 with window 7 and guesses 7 .*, got 1000000000"),
     ((512, 6, 512), r"ngram must lie in 2 .. 5 with window 512 and guesses 512 \(.*4096 nodes.*\), got 6$")],
)  # fmt: skip
def test_wrong_options_are_refused_when_the_yaml_is_read(options: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LookaheadMethod(*options)


def test_the_longest_ngram_that_is_named_is_taken() -> None:
    assert LookaheadMethod(512, 5, 512).levels == 4 and LookaheadMethod(7, 293, 7).levels == 292


def test_the_defaults_are_the_public_ones() -> None:
    assert Lookahead().nodes == 56 and LookaheadMethod().levels == 4


# ------------------------------------------------------------------------------------------------------ equivalences

SIZES = ((7, 5, 7), (3, 3, 2), (1, 4, 1), (2, 2, 3), (5, 4, 1))


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_round_is_what_plain_lists_make_of_it(sizes: tuple[int, int, int], follows: bool,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(decode_toys, "stepped", lambda state, token: (state % 12 + 3 * token) % 61)  # short memory
    proposer = Shadowed(
        *sizes, follows, end_tokens=(0, 9)
    )  # the window's alone: no prompt has them, no text ends with them
    answers = run(ToyTarget(TOY, 40), proposer, max_new_tokens=30, end_tokens=(2,))
    assert [a.tokens for a in answers] == [d.tokens for d in run(ToyTarget(TOY, 40), Vanilla(), max_new_tokens=30,
                                                                 end_tokens=(2,))]  # fmt: skip
    drawn = run(ToyTarget(TOY / 3, 40), proposer, SamplingLaw(1.0), max_new_tokens=30)
    assert proposer.tried > 0
    if follows:
        assert proposer.moved > 0
    assert sum(r.accepted for a in (*answers, *drawn) for r in a.rounds) > 0


def texts(proposer: Proposer, prompts: Tensor, lengths: Tensor, law: SamplingLaw) -> list[Decoded]:
    target = random_target()
    limit = target.spec.max_positions
    capacity = room(prompts.shape[1], 30, limit, proposer)
    return decode(
        target.open(len(prompts), capacity, proposer.needs | Needs(logits=True)), proposer, law, ExactVerifier(),
        prompts, lengths, max_new_tokens=30, end_tokens=(), context_limit=limit,
        generators=[seeded(b) for b in range(len(prompts))],
    )  # fmt: skip


def test_twelve_greedy_texts_of_a_model_equal_vanillas_and_drafts_are_accepted() -> None:
    prompts = torch.randint(97, (12, 9), generator=seeded(0))
    lengths = torch.arange(12) % 8 + 2
    plainly = texts(Vanilla(), prompts, lengths, SamplingLaw())
    for follows in (False, True):
        answers = texts(Lookahead(4, 4, 3, follows), prompts, lengths, SamplingLaw())
        assert [a.tokens for a in answers] == [a.tokens for a in plainly]
        assert sum(r.accepted for a in answers for r in a.rounds) > 0


def test_a_text_that_repeats_is_soon_guessed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_toys, "stepped", lambda state, token: token)  # each token follows from the last alone
    cycle = torch.eye(8, dtype=torch.float64).roll(1, 1)  # after 7 comes 0
    (answer,) = run(ToyTarget(cycle), Lookahead(4, 4, 2), prompts=[[3, 4, 5]], max_new_tokens=60)
    assert answer.tokens == tuple((6 + i) % 8 for i in range(60))
    assert not any(r.accepted for r in answer.rounds[:4])  # the window fills, then the pool
    assert sum(r.accepted for r in answer.rounds[-10:]) >= 21  # of 30


def test_rows_of_a_batch_are_their_single_runs() -> None:
    for law in (SamplingLaw(), SamplingLaw(0.9, top_p=0.95)):
        together = run(ToyTarget(TOY), Lookahead(3, 3, 4), law, end_tokens=(2,), max_new_tokens=25)
        assert len({len(a.tokens) for a in together}) > 1
        for b, prompt in enumerate(PROMPTS):
            (alone,) = run(ToyTarget(TOY), Lookahead(3, 3, 4), law, prompts=[prompt], end_tokens=(2,),
                           max_new_tokens=25, seeds=(b,))  # fmt: skip
            assert alone == together[b]


def test_a_proposer_serves_a_second_text_as_if_it_were_the_first() -> None:
    proposer = Lookahead(3, 3, 4)
    first = run(ToyTarget(TOY), proposer)
    run(ToyTarget(TOY), proposer, prompts=[[9, 9, 9]], seeds=(8,))
    assert run(ToyTarget(TOY), proposer) == first


# ---------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 4, 2)])
def test_texts_follow_the_targets_law_at_temperature_one(sizes: tuple[int, int, int]) -> None:
    proposer = Lookahead(*sizes)
    assert p_value(proposer, ExactVerifier(), count=5 if sizes[1] == 3 else 4) > 1e-3
    answers = run(ToyTarget(LOGITS), proposer, LAW, max_new_tokens=30)
    assert sum(r.accepted for a in answers for r in a.rounds) > 0


def test_an_end_token_inside_a_guess_ends_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_toys, "stepped", lambda state, token: token)
    cycle = torch.eye(8, dtype=torch.float64).roll(1, 1)
    for end in range(8):
        prompt = [*range(8)] * 2 + [(end + 1) % 8]

        class Primed(Lookahead):
            def start(self, *arguments) -> None:  # noqa: ANN002
                super().start(*arguments)
                for a in range(8):
                    pool(self, [[(a + i) % 8 for i in range(5)]] * 2)

        (answer,) = run(ToyTarget(cycle), Primed(2, 5, 1), prompts=[prompt], end_tokens=(end,))
        assert answer.tokens == tuple((end + 2 + i) % 8 for i in range(7))
        assert answer.ended == "end"
        assert [(r.accepted, r.emitted) for r in answer.rounds] == [(4, 5), (1, 1)]


def test_a_context_that_ends_inside_the_window_is_filled_to_its_last_position() -> None:
    for limit in range(9, 21):
        answers = run(ToyTarget(TOY, limit), Lookahead(4, 4, 3), max_new_tokens=40)
        assert [a.tokens for a in answers] == [t[: limit - len(p)] for t, p in zip(greedy(TOY), PROMPTS, strict=True)]


def test_a_penalty_is_the_targets_alone() -> None:
    law = SamplingLaw(repetition_penalty=1.7)
    answers = run(ToyTarget(TOY), Lookahead(3, 4, 3), law, max_new_tokens=30)
    assert [a.tokens for a in answers] == [t[:30] for t in greedy(TOY, law)]
