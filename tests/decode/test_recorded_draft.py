"""A round of a head recorded as one forward: the very trees of a head that runs them one by one, prompt after prompt.

On a CPU a tape records, which repeats operations on the memory they were recorded with and runs no Python; so what is
not handed to a recorded forward anew in every round shows here as it would in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from counted_record import Counted
from random_targets import random_target
from torch import Tensor

from eagle3_lab.backend.cuda_graphs import CudaRecord
from eagle3_lab.bench.costs import Laps, answer, level_step
from eagle3_lab.decode.methods import DraftLM, Head, HeadTree
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampled_trees import DrawnTree
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, StaticTree
from eagle3_lab.draft.draft_lm import FirstLayers
from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature, NoFeature, TopFeature
from eagle3_lab.draft.hydra import Hydra
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.interfaces import DraftModel, FeatureSource, Proposer
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import PADDING, Needs, Tree, Verdict

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
GROWS = {
    "chain": Chain(4),
    "static": StaticTree([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0], [1, 1, 0, 0]]),
    "dynamic": DynamicTree(levels=4, width=3, budget=12),
    "drawn": DrawnTree(StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), SamplingLaw(0.9, top_k=40), 97),
}
ROUNDS = 14


def heads() -> dict[str, tuple[FeatureSource, DraftModel]]:
    return {
        "eagle3": (FusedFeature(), Eagle3(num_layers=2)),
        "eagle1": (TopFeature(), Eagle1()),
        "medusa": (TopFeature(), Medusa(4, head="random")),
        "hydra": (TopFeature(), Hydra(4, prefix=True, head="random")),
    }


def head_for(target: HFTarget, kind: str) -> tuple[FeatureSource, DraftModel]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        source, draft = heads()[kind]
        kept = torch.arange(7, 97) if kind == "eagle3" else torch.arange(97)
        draft.build(target, source.build(target), kept.to(target.device))
    return source.to(target.device, torch.float64).eval(), draft.to(target.device, torch.float64).eval()


def on(device: str) -> tuple[HFTarget, Counted]:
    target = random_target()
    target.model.to(device)  # pyright: ignore[reportArgumentType]  transformers' decorator hides the signature
    return target, Counted(CudaRecord(target.device) if device == "cuda" else None)


def prompts_of(device: str, seed: int, longest: int = 108) -> tuple[Tensor, Tensor]:
    """Two ragged prompts."""
    ids = torch.randint(97, (2, longest), generator=torch.Generator().manual_seed(seed))
    return ids.to(device), torch.tensor([longest, longest - 19], device=device)


def down(tree: Tree, b: int, steps: int) -> list[int]:
    """The root, and below it the last child again and again, ``steps`` times where there are so many."""
    path, parents = [0], tree.parents[b].tolist()
    while len(path) <= steps and (below := [i for i, p in enumerate(parents) if p == path[-1] and i > path[-1]]):
        path.append(below[-1])
    return path


def grown(eagle: Eagle, target: HFTarget, prompts: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> Iterator[Tree]:
    """Trees round by round, while paths of all lengths are kept; the second row ends before the last two."""
    ids, lengths = prompts
    session = target.open(2, 300, eagle.needs | Needs(logits=True))
    eagle.start(ids, lengths, session.prefill(ids, lengths), 300, [torch.Generator().manual_seed(b) for b in range(2)])
    root = ids[:, 3]
    for i in range(rounds):
        tree = eagle.propose(root)
        yield tree
        out = session.score(tree)
        kept = [down(tree, b, (i * (b + 2) + b) % 6) for b in range(2)]
        if i >= rounds - 2:
            kept[1] = []
        width = max(map(len, kept))
        path = torch.tensor([k + [PADDING] * (width - len(k)) for k in kept]).to(ids.device)
        length = torch.tensor([len(k) - 1 for k in kept]).to(ids.device)
        root = (root * 5 + i) % 97
        verdict = Verdict(path, length, root)
        session.commit(verdict)
        eagle.observe(tree, verdict, out)


def assert_alike(ours: Eagle, theirs: Eagle, target: HFTarget, prompts: tuple[Tensor, Tensor]) -> None:
    seen = set()
    for mine, other in zip(grown(ours, target, prompts), grown(theirs, target, prompts), strict=True):
        assert mine.tokens.tolist() == other.tokens.tolist()
        assert mine.parents.tolist() == other.parents.tolist()
        if other.q is not None:
            torch.testing.assert_close(mine.q, other.q, atol=1e-9, rtol=1e-9)
        assert ours.grown is not None and theirs.grown is not None
        if theirs.grown.scores is not None:
            torch.testing.assert_close(ours.grown.scores, theirs.grown.scores, atol=1e-9, rtol=1e-9)
        seen.add(tuple(mine.tokens[0].tolist()))
    assert len(seen) > ROUNDS // 2, "trees that are all alike show nothing"
    assert ours._cache.lengths.tolist() == theirs._cache.lengths.tolist()
    assert ours._cache.bound == theirs._cache.bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [*(("eagle3", shape) for shape in GROWS), ("eagle1", "dynamic"), ("medusa", "static"), ("hydra", "static")],
)
def test_a_recorded_round_grows_the_tree_that_a_plain_one_grows(kind: str, shape: str, device: str) -> None:
    """Two pairs of prompts, one after the other: both cross into the second bucket, and the second replays alone."""
    target, record = on(device)
    source, draft = head_for(target, kind)
    grow = GROWS[shape]
    plain = Eagle(source, draft, grow, target.spec.layers)
    ours = Eagle(source, draft, grow, target.spec.layers, record=record)
    for seed in range(2):
        assert_alike(ours, plain, target, prompts_of(device, seed))
        assert record.recorded == 2


@pytest.mark.parametrize("kind", heads())
def test_a_level_of_every_head_can_be_timed(kind: str) -> None:
    target, record = on("cpu")
    source, draft = head_for(target, kind)
    for how in (None, record):
        step = level_step(target, Eagle(source, draft, Chain(4), target.spec.layers, record=how), [5, 6, 7])
        for width in (1, 4, 1):
            step(width)
    assert record.recorded == 2  # one of each width


def test_a_head_learns_on_in_place_and_its_recordings_with_it() -> None:
    target, record = on("cpu")
    source, draft = head_for(target, "eagle3")
    plain, ours = (Eagle(source, draft, GROWS["dynamic"], target.spec.layers, record=how) for how in (None, record))
    before = list(grown(ours, target, prompts_of("cpu", 0)))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(-1.5)
    after = list(grown(ours, target, prompts_of("cpu", 0)))
    assert [t.tokens.tolist() for t in after] != [t.tokens.tolist() for t in before]
    assert_alike(ours, plain, target, prompts_of("cpu", 0))
    assert record.recorded == 2


def test_a_prompt_of_the_recorded_width_is_read_as_any_other() -> None:
    target, record = on("cpu")
    source, draft = head_for(target, "eagle3")
    plain, ours = (Eagle(source, draft, GROWS["dynamic"], target.spec.layers, record=how) for how in (None, record))
    ids, _ = prompts_of("cpu", 0)
    assert_alike(ours, plain, target, (ids[:, :5], torch.tensor([5, 2])))


@pytest.mark.parametrize("device", DEVICES)
def test_answers_of_recorded_rounds_are_vanillas(device: str) -> None:
    target, record = on(device)
    target.record = record
    source, draft = head_for(target, "eagle3")
    head = Head(source, draft, target.record)
    proposer = HeadTree(GROWS["dynamic"]).proposer(target.spec, head)
    for seed in range(3):
        prompt = prompts_of("cpu", seed, 20)[0][0].tolist()
        wanted = answer(target, Vanilla(), SamplingLaw(), prompt, 24, Laps(device))
        made = answer(target, proposer, SamplingLaw(), prompt, 24, Laps(device))
        assert made.tokens == wanted.tokens
    assert record.recorded == 3  # the root alone, the tree, and the head's round


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(0.9)], ids=["fixed", "drawn"])
def test_a_draft_language_model_is_recorded_where_its_target_is(law: SamplingLaw, device: str) -> None:
    """Chains that grow draft by draft: a forward of the two tokens before the first draft, and one of one token."""
    (plain, _), (recorded, record) = on(device), on(device)
    recorded.record = record
    method = DraftLM(length=2, max_length=6, law=law)
    pairs = (plain, lm(plain, method)), (recorded, lm(recorded, method))
    recorded.record = None  # so that what is counted is the draft's alone
    for seed in range(3):
        prompt = prompts_of("cpu", seed, 20)[0][0].tolist()
        ours, theirs = (answer(target, drafting, law, prompt, 30, Laps(device), seed) for target, drafting in pairs)
        assert (ours.tokens, ours.rounds) == (theirs.tokens, theirs.rounds)
        assert any(r.accepted for r in ours.rounds)
    assert record.recorded == 2


def lm(target: HFTarget, method: DraftLM) -> Proposer:
    source, draft = NoFeature(), FirstLayers(2)
    draft.build(target, source.build(target), torch.arange(97, device=target.device))
    return method.proposer(target.spec, Head(source, draft.eval(), target.record))
