"""Heads that draw their candidates, in the decoder with the real caches: texts follow the target's law at T > 0."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_eagle1_proposer import train
from test_eagle_proposer import DEPTH, VOCAB, prompts, trained_head
from test_head_proposers import HEADS, trained_heads
from torch import Tensor

from eagle3_lab.config import load
from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.methods import Head, HeadTree
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampled_trees import DrawnTree
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_growth import Drawable
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, StaticTree
from eagle3_lab.decode.typical import TypicalVerifier
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation.runner import Evaluation
from eagle3_lab.interfaces import Proposer
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training.module import DraftModule
from eagle3_lab.types import Decoded, Needs, Tree

Trained = tuple[HFTarget, DraftModule]
LAW, DRAFT = SamplingLaw(1.5), SamplingLaw(1.2)
TREE = StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@pytest.fixture(scope="module")
def trained() -> Trained:
    """An EAGLE-3 head whose draft vocabulary lacks one of the target's ids."""
    return trained_head()


def drawing(
    trained: Trained,
    shape: Drawable = TREE,
    law: SamplingLaw = DRAFT,
    replacement: bool = False,
    kind: type = DrawnTree,
) -> Eagle:
    target, module = trained
    return Eagle(module.source, module.draft, kind(shape, law, VOCAB, replacement), target.spec.layers)


def answers(
    target: HFTarget,
    proposer: Proposer,
    asked: Sequence[list[int]],
    seeds: Sequence[int],
    count: int,
    law: SamplingLaw = LAW,
    ends: Sequence[int] = (),
) -> list[Decoded]:
    """One batch."""
    width = max(map(len, asked))
    return decode(
        target.open(len(asked), width + count + proposer.nodes + 1, proposer.needs | Needs(logits=True)),
        proposer,
        law,
        ExactVerifier(),
        torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in asked]),
        torch.tensor([len(prompt) for prompt in asked]),
        max_new_tokens=count,
        end_tokens=ends,
        context_limit=256,
        generators=[torch.Generator().manual_seed(seed) for seed in seeds],
    )


@torch.no_grad()
def texts_law(target: HFTarget, prompt: list[int]) -> Tensor:
    """The exact law of the answer's first three tokens, [V, V, V]."""
    pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    logits = target.model(torch.cat((torch.tensor(prompt).expand(len(pairs), -1), pairs), dim=1)).logits
    first, second, third = ((logits[:, -n] / 1.5).softmax(-1) for n in (3, 2, 1))
    law = first.gather(1, pairs[:, :1]) * second.gather(1, pairs[:, 1:]) * third
    return law.view(VOCAB, VOCAB, VOCAB)


def p_value(trained: Trained, proposer: Proposer, rows: int = 1200) -> tuple[float, int]:
    """Chi-square of the first three tokens of many answers to one prompt, cells expected below 5 pooled; and how many
    drafts were accepted."""
    target, (prompt,) = trained[0], prompts(1)
    made = answers(target, proposer, [prompt] * rows, range(rows), 3)
    digits = torch.tensor([one.tokens[:3] for one in made]) * torch.tensor([VOCAB**2, VOCAB, 1])
    seen = digits.sum(1).bincount(minlength=VOCAB**3).double()
    expected = rows * texts_law(target, prompt).flatten()
    rare = expected < 5
    seen = torch.cat((seen[~rare], seen[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert len(expected) > 20
    freedom = torch.tensor((len(expected) - 1) / 2).double()
    return torch.special.gammaincc(freedom, statistic / 2).item(), sum(r.accepted for one in made for r in one.rounds)


# ------------------------------------------------------------------------------------------------------------- the laws


@pytest.mark.parametrize(
    ("shape", "law", "replacement"),
    [
        (Chain(3), DRAFT, False),
        (TREE, DRAFT, False),
        (TREE, DRAFT, True),
        pytest.param(TREE, SamplingLaw(0.7, top_k=2), False, marks=pytest.mark.slow),
        pytest.param(
            StaticTree([[0], [0, 0], [0, 1], [0, 2]]), SamplingLaw(2.0, top_p=0.9), True, marks=pytest.mark.slow
        ),
    ],
    ids=["chain", "tree", "tree with replacement", "fewer tokens than siblings", "top-p, third of the first"],
)
def test_texts_follow_the_targets_law(trained: Trained, shape: Drawable, law: SamplingLaw, replacement: bool) -> None:
    chance, accepted = p_value(trained, drawing(trained, shape, law, replacement))
    assert chance > 1e-3
    assert accepted > 300, "a head that is never right shows nothing"


def test_texts_follow_the_targets_law_whatever_the_head_likes(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that likes most what it liked least."""
    logits = trained[1].draft.logits
    monkeypatch.setattr(trained[1].draft, "logits", lambda head_in, s: -2 * logits(head_in, s))
    assert p_value(trained, drawing(trained))[0] > 1e-3


def test_the_tests_above_see_a_q_that_is_not_the_law_of_the_draws(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = drawing(trained)
    honest = proposer.propose

    def mistaken(root: Tensor) -> Tree:
        tree = honest(root)
        assert tree.q is not None
        return replace(tree, q=tree.q**3)

    monkeypatch.setattr(proposer, "propose", mistaken)
    assert p_value(trained, proposer)[0] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra with a prefix layer", "EAGLE's first"])
def test_every_head_may_draw(kind: str) -> None:
    made = train(Unroll(DEPTH, detach=True)) if kind == "EAGLE's first" else trained_heads(kind)
    for shape in (Chain(HEADS), TREE):
        chance, accepted = p_value(made, drawing(made, shape), rows=1000)
        assert chance > 1e-3 and accepted > 50


def test_the_law_carried_is_that_of_the_heads_own_logits(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    target, module = trained
    said: list[Tensor] = []
    logits = module.draft.logits

    def noted(head_in: Tensor, s: int) -> Tensor:
        said.append(logits(head_in, s).detach())
        return said[-1]

    monkeypatch.setattr(module.draft, "logits", noted)
    proposer = drawing(trained)
    prompt, lengths = torch.tensor([prompts(1)[0]] * 2), torch.tensor([4, 3])
    session = target.open(2, 64, proposer.needs | Needs(logits=True))
    with torch.no_grad():
        proposer.start(
            prompt, lengths, session.prefill(prompt, lengths), 64, [torch.Generator().manual_seed(b) for b in (5, 6)]
        )
        tree = proposer.propose(torch.tensor([3, 2]))
    assert tree.q is not None and tree.q.shape == (2, 8, VOCAB) and not tree.replacement
    own = torch.zeros_like(tree.q)
    rows = torch.cat([one.view(2, -1, VOCAB - 1) for one in said], dim=1)  # of nodes 0, then 1 and 2, then 4
    own[:, [0, 1, 2, 4], 1:] = (rows / 1.2).softmax(-1)
    torch.testing.assert_close(tree.q, own, rtol=0, atol=1e-12)
    assert tree.parents.tolist() == [[0, 0, 0, 0, 1, 1, 2, 4]] * 2


def test_at_temperature_zero_the_answers_are_vanillas(trained: Trained) -> None:
    asked = prompts(12, first=24)

    def said(proposer: Proposer) -> list[Decoded]:
        return answers(trained[0], proposer, asked, range(12), 24, SamplingLaw(), ends=(1,))

    truth = [one.tokens for one in said(Vanilla())]
    for replacement in (False, True):
        made = said(drawing(trained, law=SamplingLaw(0.5), replacement=replacement))
        assert [one.tokens for one in made] == truth
        assert sum(r.accepted for one in made for r in one.rounds) > 20


# ------------------------------------------------------------------------------------------------------ rows and seeds


@pytest.mark.parametrize("replacement", [False, True])
def test_a_row_of_a_batch_is_the_text_of_that_row_alone(trained: Trained, replacement: bool) -> None:
    proposer = drawing(trained, replacement=replacement)
    asked = [prompt[: 2 + i % 3] for i, prompt in enumerate(prompts(5, first=24))]
    together = answers(trained[0], proposer, asked, range(5), 20, ends=(1,))
    assert len({len(one.tokens) for one in together}) > 1, "rows were to end apart"
    assert sum(r.accepted for one in together for r in one.rounds) > 5
    for b, prompt in enumerate(asked):
        (alone,) = answers(trained[0], proposer, [prompt], [b], 20, ends=(1,))
        assert (alone.tokens, alone.rounds) == (together[b].tokens, together[b].rounds)


def test_a_seed_gives_the_same_text_whatever_was_decoded_before(trained: Trained) -> None:
    proposer, asked = drawing(trained), prompts(3)
    first = answers(trained[0], proposer, asked, (1, 2, 3), 16)
    other = answers(trained[0], proposer, asked, (4, 5, 6), 9)
    again = answers(trained[0], proposer, asked, (1, 2, 3), 16)
    assert [(one.tokens, one.rounds) for one in first] == [(one.tokens, one.rounds) for one in again]
    assert [one.tokens[:9] for one in first] != [one.tokens for one in other]


# ------------------------------------------------------------------------------------------------------- as YAML has it


def first_tree(trained: Trained, method: HeadTree) -> Tree:
    target, module = trained
    proposer = method.proposer(target.spec, Head(module.source, module.draft))
    prompt, length = torch.tensor([prompts(1)[0]]), torch.tensor([4])
    session = target.open(1, 64, proposer.needs | Needs(logits=True))
    with torch.no_grad():
        proposer.start(prompt, length, session.prefill(prompt, length), 64, [torch.Generator().manual_seed(0)])
        return proposer.propose(torch.tensor([3]))


def test_a_law_draws_and_none_or_a_greedy_one_keeps_the_likeliest(trained: Trained) -> None:
    fixed, greedy = (first_tree(trained, HeadTree(TREE, law=law)) for law in (None, SamplingLaw(0.0, top_k=2)))
    assert fixed.q is None and greedy.q is None
    assert fixed.tokens.tolist() == greedy.tokens.tolist()
    for replacement in (False, True):
        drawn = first_tree(trained, HeadTree(TREE, law=DRAFT, replacement=replacement))
        assert drawn.q is not None and drawn.replacement is replacement
        assert drawn.parents.tolist() == fixed.parents.tolist()


METHOD = """
tasks: [{name: held_out}]
methods:
  eagle:
    class_path: HeadTree
    init_args:
      grow: {class_path: Chain, init_args: {length: 3}}
      law: {class_path: SamplingLaw, init_args: {temperature: 0.8}}
      replacement: true
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "grow={class_path: DynamicTree, init_args: {levels: 3, width: 2, budget: 6}}",
            "law: DynamicTree keeps nodes by score, so its candidates must be fixed",
        ),
        (
            "grow={class_path: StaticTree, init_args: {choices: [[0], [2]]}}",
            r"law: choices: \[2\] stands without its sibling \[1\]",
        ),
        ("verifier=TypicalVerifier", "law draws candidates, and TypicalVerifier judges fixed ones only"),
        ("law.init_args.repetition_penalty=1.1", "law.repetition_penalty must be 1 for a draft, got 1.1"),
        ("law=null", "replacement says how siblings are drawn from law, and law is null"),
    ],
)
def test_what_cannot_be_drawn_is_refused_when_the_yaml_is_read(tmp_path: Path, change: str, words: str) -> None:
    file = tmp_path / "methods.yaml"
    file.write_text(METHOD)
    method = load(file, into=Evaluation).methods["eagle"]
    assert isinstance(method, HeadTree) and method.law is not None
    assert (method.law.temperature, method.replacement, method.levels) == (0.8, True, 3)
    with pytest.raises(UserError, match=words) as refused:
        load(file, f"methods.eagle.init_args.{change}", into=Evaluation)
    assert "\n" not in str(refused.value)


def test_the_same_is_refused_in_a_notebook() -> None:
    with pytest.raises(ValueError, match="law: DynamicTree keeps nodes by score"):
        HeadTree(DynamicTree(3, 2, 6), law=DRAFT)
    with pytest.raises(ValueError, match="TypicalVerifier judges fixed ones only"):
        HeadTree(Chain(3), TypicalVerifier(), law=DRAFT)


def test_a_tree_made_for_drawing_is_no_shape() -> None:
    """`law` checks what is drawn from it; a `DrawnTree` given as the shape would go past that."""
    drawn = DrawnTree(Chain(2), SamplingLaw(1.0), 300)
    with pytest.raises(ValueError, match="grow must be a shape, and law what is drawn from it, got DrawnTree"):
        HeadTree(drawn)
