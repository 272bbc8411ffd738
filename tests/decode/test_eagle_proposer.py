"""The head's proposer with the real caches on tiny targets in float64: lossless, exact, and the hit table's decoder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, Grow, McSim7b63, StaticTree
from eagle3_lab.decode.trees import cut
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.evaluation.metrics import Acceptance
from eagle3_lab.interfaces import Context, Proposer
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import describe
from eagle3_lab.training.hit_reading import read_hits
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.module import DraftModule, Optimization
from eagle3_lab.types import Batch, Decoded, DraftOut, Needs, Rows, TargetOut, Verdict

VOCAB, DEPTH, ANSWER, END = 13, 5, 24, 1


def tiny_target() -> HFTarget:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=END,
        bos_token_id=0,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.mul_(4)
    return HFTarget(model, None, describe(model, None, "tiny"))


def answer(target: HFTarget, proposer: Proposer, prompt: list[int], law: SamplingLaw, seed: int = 0) -> Decoded:
    session = target.open(1, len(prompt) + ANSWER + proposer.nodes + 1, proposer.needs | Needs(logits=True))
    (made,) = decode(
        session,
        proposer,
        law,
        ExactVerifier(),
        torch.tensor([prompt]),
        torch.tensor([len(prompt)]),
        max_new_tokens=ANSWER,
        end_tokens=[END],
        context_limit=256,
        generators=[torch.Generator().manual_seed(seed)],
    )
    return made


def prompts(count: int, first: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    made = torch.randint(2, VOCAB, (first + count, 4), generator=draw).tolist()
    return made[first:]


def packed(texts: list[tuple[list[int], tuple[int, ...]]]) -> Batch:
    """Prompt and answer of each text as one document; two documents a row."""
    rows = []
    for i in range(0, len(texts), 2):
        ids, mask, position, document = [], [], [], []
        for number, (prompt, made) in enumerate(texts[i : i + 2]):
            ids += [*prompt, *made]
            mask += [False] * len(prompt) + [True] * len(made)
            position += range(len(prompt) + len(made))
            document += [number] * (len(prompt) + len(made))
        gap = 2 * (4 + ANSWER) - len(ids)
        rows.append((ids + [0] * gap, mask + [False] * gap, position + [0] * gap, document + [-1] * gap))
    ids, mask, position, document = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Batch(ids, mask, position, document)


@pytest.fixture(scope="module")
def trained() -> tuple[HFTarget, DraftModule]:
    return trained_head()


@functools.cache
def trained_head() -> tuple[HFTarget, DraftModule]:
    """A head that learned a little of the target's greedy answers, so that acceptance is neither 0 nor 1."""
    target = tiny_target()
    greedy = [(p, answer(target, Vanilla(), p, SamplingLaw()).tokens) for p in prompts(24)]
    source, draft = FusedFeature(), Eagle3()
    draft.build(target, source.build(target), torch.arange(1, VOCAB))  # one target id outside the draft vocabulary
    module = DraftModule(target, source, draft, Unroll(DEPTH), UnrolledLoss([SoftCE()]), Optimization()).double()
    batch = packed(greedy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(25):
        optimizer.zero_grad()
        module.run(batch)[0].total.backward()
        optimizer.step()
    return target, module.eval()


SHAPES: dict[str, Callable[[], Grow]] = {
    "chain": lambda: Chain(DEPTH),
    "static": lambda: StaticTree([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0]]),
    "published": McSim7b63,
    "dynamic": lambda: DynamicTree(levels=4, width=3, budget=12),
    "dynamic, one level": lambda: DynamicTree(levels=1, width=4, budget=4),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_answers_are_vanillas(trained: tuple[HFTarget, DraftModule], shape: str) -> None:
    target, module = trained
    proposer = Eagle(module.source, module.draft, SHAPES[shape](), target.spec.layers)
    accepted = 0
    for prompt in prompts(12, first=24):
        made = answer(target, proposer, prompt, SamplingLaw())
        assert made.tokens == answer(target, Vanilla(), prompt, SamplingLaw()).tokens
        accepted += sum(r.accepted for r in made.rounds)
    assert accepted > 10, "a head that is never right shows nothing"


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
def test_sampled_answers_follow_vanillas_law(trained: tuple[HFTarget, DraftModule], shape: str) -> None:
    """Counts of the second token over fixed seeds against the target's exact law, by chi-square."""
    target, module = trained
    proposer = Eagle(module.source, module.draft, SHAPES[shape](), target.spec.layers)
    law, prompt, draws = SamplingLaw(temperature=1.5), prompts(1)[0], 400
    first = (target.model(torch.tensor([prompt])).logits[0, -1] / 1.5).softmax(-1)
    second = torch.zeros(VOCAB, dtype=torch.float64)  # law of the second token; an end token has no second
    for token in set(range(VOCAB)) - {END}:
        after = (target.model(torch.tensor([[*prompt, token]])).logits[0, -1] / 1.5).softmax(-1)
        second += first[token] * after
    made = [_two_tokens(target, proposer, prompt, law, seed) for seed in range(draws)]
    seen = torch.bincount(torch.tensor([tokens[1] for tokens in made if len(tokens) == 2]), minlength=VOCAB)
    cells = second * draws
    keep = cells > 5
    chi = float((((seen - cells) ** 2) / cells)[keep].sum())
    assert int(keep.sum()) >= 4
    assert chi < 3 * int(keep.sum()), f"chi-square {chi:.1f} over {int(keep.sum())} cells"


def _two_tokens(
    target: HFTarget, proposer: Proposer, prompt: list[int], law: SamplingLaw, seed: int
) -> tuple[int, ...]:
    session = target.open(1, len(prompt) + 3 + proposer.nodes, proposer.needs | Needs(logits=True))
    (made,) = decode(
        session,
        proposer,
        law,
        ExactVerifier(),
        torch.tensor([prompt]),
        torch.tensor([len(prompt)]),
        max_new_tokens=2,
        end_tokens=[END],
        context_limit=256,
        generators=[torch.Generator().manual_seed(seed)],
    )
    return made.tokens


def test_the_walked_hit_table_is_the_chain_decoder_integer_for_integer(trained: tuple[HFTarget, DraftModule]) -> None:
    target, module = trained
    proposer = Eagle(module.source, module.draft, Chain(DEPTH), target.spec.layers)
    asked = prompts(16, first=24)
    decoded = [answer(target, proposer, p, SamplingLaw()) for p in asked]
    reading = read_hits(module, [packed([(p, d.tokens) for p, d in zip(asked, decoded, strict=True)])])
    assert [[(r.judged, r.accepted, r.emitted) for r in rounds] for rounds in reading.answers] == [
        [(r.judged, r.accepted, r.emitted) for r in d.rounds] for d in decoded
    ]
    counted = Acceptance.of((r for d in decoded for r in d.rounds), DEPTH)
    assert (reading.visited.rounds, reading.visited.emitted) == (counted.rounds, counted.emitted)
    assert sum(counted.accepted) > 10


def test_the_drafts_cache_is_that_of_a_fresh_start_after_scattered_paths(trained: tuple[HFTarget, DraftModule]) -> None:
    """Rounds whose second child is right on two levels: the path lies scattered in the tree."""
    target, module = trained
    grow = StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
    ours = Eagle(module.source, module.draft, grow, target.spec.layers)
    prompt = torch.tensor([prompts(1)[0]])
    length = torch.tensor([4])
    needs = ours.needs | Needs(logits=True)
    session = target.open(1, 64, needs)
    ours.start(prompt, length, session.prefill(prompt, length), 64, [])
    committed, root = prompt, torch.tensor([3])
    for _ in range(3):
        tree = ours.propose(root)
        out = session.score(tree)
        second = tree.parents[0].tolist().index(0, 2)  # the root's second child
        child = [i for i, parent in enumerate(tree.parents[0].tolist()) if parent == second and i > 0][-1]
        verdict = Verdict(torch.tensor([[0, second, child]]), torch.tensor([2]), torch.tensor([7]))
        session.commit(verdict)
        ours.observe(tree, verdict, out)
        committed = torch.cat((committed, tree.tokens[:, [0, second, child]]), dim=1)
        root = verdict.bonus

    fresh = Eagle(module.source, module.draft, grow, target.spec.layers)
    again = target.open(1, 64, needs)
    count = torch.tensor([committed.shape[1]])
    fresh.start(committed, count, again.prefill(committed, count), 64, [])
    left, right = ours.propose(root), fresh.propose(root)
    assert left.tokens.tolist() == right.tokens.tolist()
    assert ours._cache is not None and fresh._cache is not None
    assert ours._cache.lengths.tolist() == fresh._cache.lengths.tolist() == [committed.shape[1]]
    for mine, theirs in zip(ours._cache.read(0, int(count)), fresh._cache.read(0, int(count)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)


def test_the_draft_tree_is_the_official_one(oracles: Path) -> None:
    """Made by SafeAILab/EAGLE cb7e084, eagle/model/cnets.py topK_genrate, with total_tokens 12, depth 3, top_k 4."""
    golden = load_file(oracles / "official_infer.safetensors")
    inputs = load_file(oracles / "inputs.safetensors")
    weights = load_file(oracles / "heads/official/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(oracles / "target", dtype=torch.float32)
    target = HFTarget(model, None, describe(model, None, "oracle"))
    source, draft = FusedFeature(), Eagle3(rope_base=10000.0)
    vocab = weights["d2t"] + torch.arange(len(weights["d2t"]))
    draft.build(target, source.build(target), vocab)
    source.load_state_dict({"fc.weight": weights["fc.weight"]})
    renamed = {
        k.replace("midlayer.", "layers.0."): v for k, v in weights.items() if k not in ("fc.weight", "d2t", "t2d")
    }
    draft.load_state_dict(renamed | {f"draft_vocab.{k}": weights[k] for k in ("d2t", "t2d")})

    eagle = Eagle(source, draft, DynamicTree(levels=4, width=4, budget=12), target.spec.layers)
    taps = tuple(inputs["hidden_states"][:1].chunk(3, dim=-1))
    prompt = inputs["input_ids"][:1]
    with torch.no_grad():
        eagle.start(prompt, torch.tensor([prompt.shape[1]]), TargetOut(taps), 64, [])
        tree = eagle.propose(golden["shifted_ids"].reshape(-1)[-1:])
    assert tree.tokens[0].tolist() == golden["tree_draft_tokens"].reshape(-1).tolist()
    assert tree.visible()[0].int().tolist() == golden["tree_mask"].reshape(12, 12).int().tolist()
    assert tree.depth()[0].tolist() == golden["tree_position_ids"].reshape(-1).tolist()
    paths = golden["tree_retrieve_indices"]
    leaves = {int(row[row >= 0][-1]) for row in paths}
    assert leaves == set(range(12)) - set(tree.parents[0, 1:].tolist())


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(trained: tuple[HFTarget, DraftModule]) -> None:
    target, module = trained
    with pytest.raises(ValueError, match="width is 40, the draft vocabulary has 12 tokens"):
        Eagle(module.source, module.draft, DynamicTree(levels=2, width=40, budget=10), target.spec.layers)


@pytest.mark.parametrize("grow", [Chain(1), Chain(4), DynamicTree(3, 2, 6)])
def test_it_drafts_up_to_the_last_position_of_its_context_and_never_beyond(
    trained: tuple[HFTarget, DraftModule], grow: Grow, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, module = trained
    limit, seen = 16, []
    step = module.draft.step

    def watched(carry: Tensor, ids: Tensor, rows: Rows, s: int, context: Context) -> DraftOut:
        seen.append(int(rows.position.max()))
        return step(carry, ids, rows, s, context)

    monkeypatch.setattr(module.draft, "step", watched)
    proposer = Eagle(module.source, module.draft, grow, target.spec.layers, max_positions=limit)
    finish = proposer.propose
    # Nothing is accepted, so that every index is a root's once.
    monkeypatch.setattr(proposer, "propose", lambda root: cut(finish(root), torch.zeros_like(root)))
    (prompt,) = prompts(1)
    made = answer(target, proposer, prompt, SamplingLaw())
    assert made.tokens == answer(target, Vanilla(), prompt, SamplingLaw()).tokens
    assert len(prompt) + len(made.tokens) > limit + grow.levels
    assert max(seen) == limit - 1


def test_a_tree_deeper_than_the_drafts_context_is_refused(trained: tuple[HFTarget, DraftModule]) -> None:
    target, module = trained
    with pytest.raises(ValueError, match="a tree of 4 levels does not fit the draft's context of 3"):
        Eagle(module.source, module.draft, Chain(4), target.spec.layers, max_positions=3)


def test_rows_of_a_batch_answer_as_each_alone(trained: tuple[HFTarget, DraftModule]) -> None:
    target, module = trained
    proposer = Eagle(module.source, module.draft, SHAPES["dynamic"](), target.spec.layers)
    asked = [p[: 2 + i % 3] for i, p in enumerate(prompts(5, first=24))]
    width = max(map(len, asked))
    session = target.open(5, width + ANSWER + proposer.nodes + 1, proposer.needs | Needs(logits=True))
    made = decode(
        session,
        proposer,
        SamplingLaw(),
        ExactVerifier(),
        torch.tensor([p + [0] * (width - len(p)) for p in asked]),
        torch.tensor([len(p) for p in asked]),
        max_new_tokens=ANSWER,
        end_tokens=[END],
        context_limit=256,
        generators=[torch.Generator().manual_seed(i) for i in range(5)],
    )
    for prompt, one in zip(asked, made, strict=True):
        alone = answer(target, proposer, prompt, SamplingLaw())
        assert (one.tokens, one.rounds) == (alone.tokens, alone.rounds)
