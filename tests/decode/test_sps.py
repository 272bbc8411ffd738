"""Speculative sampling with a second model: lossless whatever it drafts, its cache always that of a fresh start."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_toys import PROMPTS, VOCAB, ToyTarget, greedy, run, seeded, table
from random_targets import random_target
from test_loop_sampling import p_value
from tiny import write_target
from torch import Tensor

from eagle3_lab.backend.cuda_graphs import Captured, Tape
from eagle3_lab.data.tasks import Task
from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.methods import DraftLM, PromptLookup, Vanilla
from eagle3_lab.decode.propose.sps import Lengths, SpeculativeSampling
from eagle3_lab.decode.propose.vanilla import Vanilla as VanillaProposer
from eagle3_lab.decode.sampled_trees import split
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.errors import UserError
from eagle3_lab.evaluation import runner as evaluation_module
from eagle3_lab.evaluation.runner import Contestant, Evaluation, measure
from eagle3_lab.interfaces import Proposer
from eagle3_lab.target_model.hf_target import HFSession, HFTarget
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.types import Decoded, Needs, TargetOut, Tree, Verdict

LOGITS = table(VOCAB, 0)
VARIED = table(60, 3)
GREEDY, DRAWN = SamplingLaw(), SamplingLaw(1.0)
FIXED = Lengths(3, adaptive=False)


class ToyDraft(ToyTarget):
    """A draft model made of a table; refuses a token that it does not know, and notes how many each forward reads."""

    def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOut:
        self.read: list[int] = []
        return super().prefill(ids, lengths)

    def score(self, tree: Tree, done: int = 0) -> TargetOut:
        assert (tree.tokens < self.table.shape[1]).all()
        self.read.append(tree.tokens.shape[1] - done)
        logits = super().score(tree).logits
        assert logits is not None
        return TargetOut(logits=logits[:, done:])


class Watching(SpeculativeSampling):
    """Notes how many drafts each row was offered, and keeps the text that was committed before the root."""

    def start(
        self, prompt: Tensor, lengths: Tensor, out: TargetOut, capacity: int, generators: Sequence[torch.Generator]
    ) -> None:
        super().start(prompt, lengths, out, capacity, generators)
        self.offered: list[list[int]] = []
        self.text = [row[:n].tolist() for row, n in zip(prompt, lengths.tolist(), strict=True)]

    def propose(self, root: Tensor) -> Tree:
        tree = super().propose(root)
        self.offered.append((tree.candidate.sum(1) - 1).tolist())
        return tree

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        super().observe(tree, verdict, out)
        for b, path in enumerate(verdict.path):
            self.text[b] += tree.tokens[b, path[path >= 0]].tolist()


def toy(
    draft: Tensor,
    law: SamplingLaw = GREEDY,
    lengths: Lengths = FIXED,
    *,
    target_vocab: int = VOCAB,
    max_positions: int = 10**6,
    kind: type[SpeculativeSampling] = Watching,
) -> SpeculativeSampling:
    return kind(
        lambda rows, capacity: ToyDraft(draft, max_positions),
        vocab=draft.shape[1],
        target_vocab=target_vocab,
        max_positions=max_positions,
        lengths=lengths,
        law=law,
    )


def answered(target: HFTarget, proposer: Proposer, law: SamplingLaw = GREEDY, count: int = 13) -> list[Decoded]:
    prompts = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0], [11, 0, 0, 0]])
    session = target.open(3, 4 + count + proposer.nodes + 1, proposer.needs | Needs(logits=True))
    return decode(
        session, proposer, law, ExactVerifier(), prompts, torch.tensor([4, 2, 1]), max_new_tokens=count, end_tokens=(),
        context_limit=256, generators=[seeded(b) for b in range(3)],
    )  # fmt: skip


def inverted(target: HFTarget) -> HFTarget:
    """The same model, which likes most what it liked least."""
    target.model.get_output_embeddings().weight.data.mul_(-1)
    return target


# -------------------------------------------------------------------------------------------------------------- lengths


def test_lengths_grow_by_two_after_a_whole_chain_and_shrink_by_one_after_any_other() -> None:
    lengths = Lengths(5, True, 12)
    now = torch.tensor([5, 5, 11, 12, 1, 2])
    assert lengths.after(now, torch.tensor([5, 4, 11, 12, 0, -1])).tolist() == [7, 4, 12, 12, 1, 1]
    assert Lengths(5, False).after(now, now).tolist() == now.tolist()


def test_the_hosts_bound_is_exact_for_one_row_and_holds_for_several() -> None:
    lengths, rng = Lengths(5, True, 12), seeded(0)
    for rows in (1, 3):
        now, bound = torch.full((rows,), 5), 5
        for _ in range(200):
            accepted = (torch.rand(rows, generator=rng) * (now + 2)).long().minimum(now)
            bound = lengths.bound_after(bound, int(accepted.max()), rows)
            now = lengths.after(now, accepted)
            assert bound == int(now) if rows == 1 else bound >= int(now.max())
            assert bound <= 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "length must be >= 1, got 0"),
        ((13, True, 12), "length must be at most max_length 12, got 13"),
        ((10**9, False), "length must be at most 1024, got 1000000000"),
        ((5, True, 10**9), "max_length must be at most 1024, got 1000000000"),
    ],
)
def test_wrong_lengths_are_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lengths(*arguments)


def test_a_draft_with_a_penalty_or_without_room_for_a_chain_is_refused() -> None:
    with pytest.raises(ValueError, match=r"law.repetition_penalty must be 1 for a draft, got 1.2"):
        toy(LOGITS, SamplingLaw(1.0, repetition_penalty=1.2))
    with pytest.raises(ValueError, match="the draft's context 3, got 3"):
        toy(LOGITS, max_positions=3)


# --------------------------------------------------------------------------------------------- by hand: what is drafted


def test_the_same_model_as_its_own_draft_is_always_accepted_and_gets_longer_chains() -> None:
    proposer = toy(LOGITS, lengths=Lengths())
    (answer,) = run(ToyTarget(LOGITS), proposer, prompts=PROMPTS[:1], max_new_tokens=50)
    assert answer.tokens == greedy(LOGITS, count=50)[0]
    assert proposer.offered == [[5], [7], [9], [11], [12]]
    assert [r.emitted for r in answer.rounds] == [6, 8, 10, 12, 13]
    # A forward a draft: the first reads the root and the token before it, each other the draft of the one before.
    assert proposer._session.read == [n for (drafts,) in proposer.offered for n in [2, *[1] * (drafts - 1)]]


def test_a_draft_that_is_always_wrong_costs_one_token_a_round_and_gets_shorter_chains() -> None:
    proposer = toy(-LOGITS, lengths=Lengths())
    (answer,) = run(ToyTarget(LOGITS), proposer, prompts=PROMPTS[:1], max_new_tokens=9)
    assert answer.tokens == greedy(LOGITS)[0][:9]
    assert proposer.offered == [[5], [4], [3], [2], [1], [1], [1], [1]]
    assert {(r.judged, r.accepted, r.emitted) for r in answer.rounds} == {(1, 0, 1)}


def test_a_drawn_chain_carries_the_law_it_was_drawn_from_in_target_ids() -> None:
    law = SamplingLaw(0.7, top_k=5)
    wide = torch.cat((LOGITS, LOGITS[:, :3] + 9), dim=1)  # the draft's head has three rows more, and likes them
    proposer = toy(wide, law, Lengths(2, True, 4))
    prompt, lengths = torch.tensor([[3, 1, 4], [2, 7, 0]]), torch.tensor([3, 2])
    proposer.start(prompt, lengths, TargetOut(), 30, [seeded(0), seeded(1)])
    tree = proposer.propose(torch.tensor([5, 6]))
    assert tree.parents.tolist() == [[0, 0, 1, -1, -1]] * 2
    assert tree.q.shape == (2, 5, VOCAB) and tree.replacement
    for b in range(2):
        ids = [*prompt[b, : lengths[b]].tolist(), *tree.tokens[b, :3].tolist()]
        for node in range(2):
            alone = ToyTarget(LOGITS)
            count = int(lengths[b]) + 1 + node
            logits = alone.prefill(torch.tensor([ids[:count]]), torch.tensor([count])).logits
            torch.testing.assert_close(tree.q[b, node], law.probs(logits, ids_of(ids), tree_of(ids))[0, 0])
            assert tree.q[b, node, tree.tokens[b, node + 1]] > 0
    assert (tree.q[:, 2:] == 0).all()


def ids_of(ids: list[int]) -> Tensor:
    return torch.tensor([ids])


def tree_of(ids: list[int]) -> Tree:
    root = torch.tensor([[ids[-1]]])
    return Tree(root, torch.zeros_like(root), torch.ones_like(root, dtype=torch.bool))


def test_a_greedy_draft_proposes_fixed_candidates() -> None:
    proposer = toy(LOGITS)
    proposer.start(torch.tensor([[3, 1]]), torch.tensor([2]), TargetOut(), 30, [seeded(0)])
    assert proposer.propose(torch.tensor([4])).q is None


def test_streams_are_split_off_without_touching_the_rows_generator() -> None:
    generators = [seeded(1), seeded(2), seeded(1)]
    states = [g.get_state() for g in generators]
    one, two, again = (torch.rand(4, generator=g) for g in split(generators))
    assert torch.equal(one, again) and not torch.equal(one, two)
    assert all(torch.equal(g.get_state(), s) for g, s in zip(generators, states, strict=True))
    assert not torch.equal(one, torch.rand(4, generator=seeded(1)))


# --------------------------------------------------------------------------------------------------- temperature zero


DRAFTS: dict[str, Callable[[], HFTarget]] = {
    "another model": lambda: random_target(seed=1, num_hidden_layers=2),
    "the same model": random_target,
    "the same model, always wrong": lambda: inverted(random_target()),
    "another model of fewer ids": lambda: random_target(seed=1, vocab_size=90),
    "the same model with more ids": lambda: widened(random_target()),
}


def widened(target: HFTarget) -> HFTarget:
    target.model.resize_token_embeddings(104, mean_resizing=False)
    from eagle3_lab.target_model.loading import describe

    return HFTarget(target.model, None, describe(target.model, None, "wide"))


@pytest.mark.parametrize("law", [GREEDY, SamplingLaw(0.8)], ids=["greedy draft", "drawn draft"])
@pytest.mark.parametrize("name", DRAFTS)
def test_it_equals_vanilla_at_temperature_zero_and_its_cache_a_fresh_prefill(name: str, law: SamplingLaw) -> None:
    target, draft = random_target(), DRAFTS[name]()
    truth = [a.tokens for a in answered(target, VanillaProposer())]

    class Checking(Watching):
        """Compares the draft's cache with one made anew, after every verdict."""

        compared = 0

        def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
            super().observe(tree, verdict, out)
            session = self._session
            assert isinstance(session, HFSession)
            for b, text in enumerate(self.text):
                known = torch.tensor([text[:-1]]).clamp(max=draft.spec.vocab - 1)  # its last is read with the root
                count = known.shape[1]
                if count == 0:
                    continue
                assert int(session.lengths[b]) == count
                fresh = draft.open(1, 64, Needs(logits=True))
                fresh.prefill(known, torch.tensor([count]))
                for layer in range(draft.spec.layers):
                    for ours, new in zip(session.cache.read(layer, 64), fresh.cache.read(layer, 64), strict=True):
                        torch.testing.assert_close(ours[b, :, :count], new[0, :, :count], atol=1e-4, rtol=1e-5)
                self.compared += 1

    proposer = Checking(
        lambda rows, capacity: draft.open(rows, capacity, Needs(logits=True)), vocab=draft.spec.vocab, target_vocab=97,
        max_positions=draft.spec.max_positions, lengths=Lengths(3, True, 5), law=law,
    )  # fmt: skip
    answers = answered(target, proposer)
    assert [a.tokens for a in answers] == truth
    assert proposer.compared >= 6
    accepted = sum(r.accepted for a in answers for r in a.rounds)
    if name == "the same model" and law is GREEDY:
        assert all(r.accepted == r.emitted - 1 for a in answers for r in a.rounds[:-1])
        assert accepted > 20
    if name == "the same model, always wrong" and law is GREEDY:
        assert accepted == 0


def test_an_end_token_stops_exactly_there_wherever_it_stands_in_a_block() -> None:
    text = greedy(VARIED, prompts=PROMPTS[:1])[0]
    firsts = sorted({text.index(token) for token in text})
    assert set(range(7)) <= set(firsts)  # prefill's, the first block's and its bonus, the next block's first
    for law in (GREEDY, DRAWN):
        for k in firsts:
            target = ToyTarget(VARIED)
            (answer,) = run(target, toy(VARIED, law, target_vocab=60), prompts=PROMPTS[:1], end_tokens=(text[k],),
                            max_new_tokens=40)  # fmt: skip
            assert (answer.tokens, answer.ended) == (text[: k + 1], "end")
            assert target.ids[0, : target.lengths[0]].tolist() == [*PROMPTS[0], *text[:k]]


@pytest.mark.parametrize("context", range(5, 16))
def test_past_the_drafts_context_the_target_goes_on_alone(context: int) -> None:
    truth = greedy(LOGITS)
    proposer = toy(LOGITS, max_positions=context)  # the toy refuses a position past its context
    answers = run(ToyTarget(LOGITS), proposer, max_new_tokens=25)
    assert [a.tokens for a in answers] == [t[:25] for t in truth]
    for b, prompt in enumerate(PROMPTS):
        drafted = sum(r.judged for r in answers[b].rounds)
        # A chain is drafted while its last token that is read, two before its end, stands within the context.
        assert (drafted > 0) == (len(prompt) + 2 < context)
        (alone,) = run(ToyTarget(LOGITS), toy(LOGITS, max_positions=context), prompts=[prompt], max_new_tokens=25)
        assert alone == answers[b]


def test_the_targets_context_and_length_stop_it() -> None:
    truth = greedy(LOGITS)
    for limit in range(1, 12):
        answers = run(ToyTarget(LOGITS, 12), toy(LOGITS, lengths=Lengths()), max_new_tokens=limit)
        for answer, text, prompt in zip(answers, truth, PROMPTS, strict=True):
            assert answer.tokens == text[: min(limit, 12 - len(prompt))]


# ------------------------------------------------------------------------------------------------------ temperature one


LAWS: dict[str, Callable[[], Proposer]] = {
    "another model, cold and cut": lambda: four(table(4, 1, scale=1.0), SamplingLaw(0.5, top_k=2)),
    "adaptive": lambda: four(table(4, 1, scale=1.0), lengths=Lengths(1, True, 3)),
    "more ids": lambda: four(table(6, 1, scale=1.0)),
    "fewer ids": lambda: four(table(3, 1, scale=1.0)),
    "greedy": lambda: four(table(4, 1, scale=1.0), GREEDY),
}


def four(draft: Tensor, law: SamplingLaw = DRAWN, lengths: Lengths = Lengths(2, False)) -> Proposer:  # noqa: B008
    return toy(draft, law, lengths, target_vocab=4, kind=SpeculativeSampling)


@pytest.mark.parametrize("name", LAWS)
def test_texts_follow_the_targets_law_at_temperature_one(name: str) -> None:
    assert p_value(LAWS[name](), ExactVerifier()) > 1e-3


def test_the_test_above_sees_a_q_that_is_not_the_law_of_the_draws() -> None:
    class Mistaken(SpeculativeSampling):
        """Draws at one temperature, and says another (F6)."""

        def _q(self, laws: list[Tensor]) -> Tensor:
            return super()._q([(law**2) / (law**2).sum(-1, keepdim=True) for law in laws])

    assert p_value(toy(table(4, 1, scale=1.0), DRAWN, target_vocab=4, kind=Mistaken), ExactVerifier()) < 1e-6


@pytest.mark.parametrize("law", [GREEDY, SamplingLaw(0.9, top_p=0.95)], ids=["greedy draft", "drawn draft"])
def test_a_row_of_a_batch_is_the_text_of_that_row_alone(law: SamplingLaw) -> None:
    def texts(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Decoded]:
        proposer = toy(0.7 * LOGITS + 0.3 * table(VOCAB, 5), law, Lengths(3, True, 6))
        return run(ToyTarget(LOGITS), proposer, DRAWN, prompts=prompts, seeds=seeds, end_tokens=(2,), max_new_tokens=15)

    together = texts(PROMPTS, (11, 12, 13))
    assert len({len(a.tokens) for a in together}) > 1
    assert sum(r.accepted for a in together for r in a.rounds) > 0
    assert together == texts(PROMPTS, (11, 12, 13))
    for b, prompt in enumerate(PROMPTS):
        assert texts([prompt], (11 + b,)) == [together[b]]


# ---------------------------------------------------------------------------------------------- as a YAML names it


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("targets")
    return {
        "target": str(write_target(root / "target")),
        "smaller, more rows": str(write_target(root / "small", hidden=16, vocab=310)),
        "other tokenizer": str(write_target(root / "other", special="<|other|>")),
    }


def test_a_draft_with_another_vocabulary_is_refused_by_name(folders: dict[str, str]) -> None:
    target = TargetChoice(folders["target"]).load()
    with pytest.raises(ValueError, match="'.*other' has another vocabulary than '.*target'; .* tokenizer"):
        DraftLM(TargetChoice(folders["other tokenizer"])).proposer(target.spec, None)
    task = Task("mine", prompts_file(Path(folders["target"]).parent))
    wrong = DraftLM(TargetChoice(folders["other tokenizer"]))
    with pytest.raises(UserError, match=r"evaluate.methods.sps: target.model: .* another vocabulary"):
        measure([Contestant("sps", wrong, target)], Evaluation([task], {"sps": wrong}), None)


def prompts_file(folder: Path) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in (["abc", "again"], ["hello hello"])))
    return str(file)


def test_methods_without_a_head_are_measured_and_say_what_vanilla_says(folders: dict[str, str], tmp_path: Path) -> None:
    target = TargetChoice(folders["target"], dtype=torch.float64).load()
    methods = {
        "pld": PromptLookup(length=4, full=False),
        "sps": DraftLM(TargetChoice(folders["smaller, more rows"])),
        "drawn": DraftLM(TargetChoice(folders["target"]), length=3, adaptive=False, law=SamplingLaw(0.6)),
    }
    assert [(m.levels, m.needs_head) for m in methods.values()] == [(4, False), (12, False), (3, False)]
    evaluation = Evaluation([Task("mine", prompts_file(tmp_path))], methods, max_new_tokens=12)
    contestants = [Contestant("vanilla", Vanilla(), target), *(Contestant(n, m, target) for n, m in methods.items())]
    turns = measure(contestants, evaluation, None)
    said = {name: [t.decoded.tokens for t in made] for name, made in turns.items()}
    assert len(said["vanilla"]) == 3
    assert all(texts == said["vanilla"] for texts in said.values())
    assert sum(r.accepted for t in turns["drawn"] for r in t.decoded.rounds) > 3


def test_no_answer_is_timed_in_which_something_was_recorded(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetChoice(folders["target"], dtype=torch.float64).load()
    target.record = Tape()
    timed: list[tuple[str, int, float]] = []
    answer = evaluation_module._Player._decode

    def decode(player: Any, law: Any, ids: Any, limit: int, seed: int) -> Any:
        before = Captured.made
        found = answer(player, law, ids, limit, seed)
        if limit > evaluation_module.WARM_UP_TOKENS:
            timed.append((player.name, Captured.made - before, found[1]))
        return found

    monkeypatch.setattr(evaluation_module._Player, "_decode", decode)
    pld = PromptLookup(length=4, full=False)
    evaluation = Evaluation([Task("mine", prompts_file(tmp_path))], {"pld": pld}, max_new_tokens=120)  # past a bucket
    contestants = [Contestant("vanilla", Vanilla(), target), Contestant("pld", pld, target)]
    turns = measure(contestants, evaluation, None)
    assert any(made for _, made, _ in timed), "the warm-up recorded it all, and this tells nothing"
    kept = {(name, seconds) for name, made, seconds in timed if made == 0}
    assert {(name, t.seconds) for name, all in turns.items() for t in all} <= kept
    said = {name: [t.decoded.tokens for t in all] for name, all in turns.items()}
    assert said["pld"] == said["vanilla"]


def test_a_yaml_names_them(tmp_path: Path) -> None:
    from eagle3_lab.config import load

    file = tmp_path / "methods.yaml"
    file.write_text(
        """
tasks: [{name: held_out}]
methods:
  pld: PromptLookup
  sps:
    class_path: DraftLM
    init_args:
      target: {model: some/where, dtype: bfloat16}
      length: 4
      law: {class_path: SamplingLaw, init_args: {temperature: 0.5}}
"""
    )
    methods = load(file, into=Evaluation).methods
    assert methods["pld"].levels == 10
    assert methods["sps"].target == TargetChoice("some/where", dtype=torch.bfloat16)
    assert (methods["sps"].lengths, methods["sps"].law.temperature) == (Lengths(4), 0.5)
    with pytest.raises(UserError, match="length must be at most max_length 12, got 99"):
        load(file, "methods.sps.init_args.length=99", into=Evaluation)
