"""The decoder's laws on the embedded target, where rounding is real.

float32, T = 0: every method says what vanilla says, or differs first where vanilla's two best logits lie closer than
twice the difference between a forward of one row and one of n rows, measured on that prefix. bfloat16, T = 0: every
committed token's one-row logit is within the run's one-row/n-row difference of the maximum. And the hit table's walk is
the chain decoder. What was measured is printed (``pytest -s``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from embedded_runs import NOISE, Run, Tally, check_float32, first_difference, gap, is_lawful, one_row, run
from torch import Tensor

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.conversations import Conversation, read_conversations
from eagle3_lab.data.held_out import candidates
from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.propose.eagle import Eagle
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampled_trees import DrawnTree
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain, DynamicTree, Grow, McSim7b63
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import Proposer
from eagle3_lab.pipeline import packaged_data
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.training.hit_reading import read_hits
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.module import DraftModule, Optimization
from eagle3_lab.types import Batch, Needs, TargetOut, Tree, Verdict

pytestmark = pytest.mark.slow

PROMPTS, TOKENS, DEPTH = 4, 40, 7
VOCAB, STEPS = 512, 14


# ------------------------------------------------------------------------------------------------------ what is asked


@pytest.fixture(scope="module")
def asked(embedded: HFTarget) -> list[Conversation]:
    """Held-out conversations with short first questions, in their fixed order."""
    found, _ = read_conversations("package:conversations")
    ordered = candidates(found, None).held_out
    short = [one for one in ordered if len(one.messages[0]["content"]) < 110 and not one.looping]
    return short[:PROMPTS]


@pytest.fixture(scope="module")
def plain(embedded: HFTarget, asked: list[Conversation]) -> list[Run]:
    """Vanilla's answers."""
    chat = Chat(embedded.tokenizer)
    return [run(embedded, Vanilla(), chat.prompt_ids(one.messages[:1])) for one in asked]


def packed(runs: Sequence[Run], device: torch.device) -> Batch:
    """Prompts with answers, one document each, in one row."""
    texts = [r.prompt + list(r.tokens) for r in runs]
    answers = [[False] * len(r.prompt) + [True] * len(r.tokens) for r in runs]
    position = [i for text in texts for i in range(len(text))]
    document = [number for number, text in enumerate(texts) for _ in text]
    ids, supervised = ([x for one in many for x in one] for many in (texts, answers))
    return Batch(*(torch.tensor([x]) for x in (ids, supervised, position, document))).to(device)


def head(target: HFTarget, runs: Sequence[Run]) -> DraftModule:
    """An untrained head that can say every token of these answers."""
    said = torch.tensor(sorted({token for r in runs for token in r.tokens} | set(target.spec.end_tokens)))
    others = torch.arange(target.spec.vocab)
    others = others[~torch.isin(others, said)][: VOCAB - len(said)]
    vocab = torch.cat((said, others)).sort().values.to(target.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        source, draft = FusedFeature(), Eagle3(head="target")
        draft.build(target, source.build(target), vocab)
    loss = UnrolledLoss([SoftCE(1.0)], step_decay=0.8)
    return DraftModule(target, source, draft, Unroll(DEPTH), loss, Optimization()).to(target.device).eval()


@pytest.fixture(scope="module")
def untrained(embedded: HFTarget, plain: list[Run]) -> DraftModule:
    return head(embedded, plain)


@pytest.fixture(scope="module")
def trained(embedded: HFTarget, plain: list[Run]) -> DraftModule:
    """A head that has learnt the very answers it will draft, by heart but not perfectly: it accepts runs of all
    lengths."""
    module, batch = head(embedded, plain), packed(plain, embedded.device)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1.5e-3)
    out = embedded.features(batch, module.needs)
    for _ in range(STEPS):
        steps = list(module.unroll(module.draft, module.source(out.taps), batch))
        loss = module.loss(module.draft, steps, batch, embedded, out.top)
        optimizer.zero_grad()
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return module


class Knowing(Proposer):
    """Knows vanilla's answer and drafts it among wrong siblings, in one tree of nine nodes:

        root - 1 wrong - 3 (the truth's second token, below a wrong first) - 8 (its third)
             - 2 right - 4 wrong
                       - 5 right - 6 right - 7 wrong

    so the second child is right on two levels. In every third round node 2 is wrong as well, in every third node 6.
    """

    PARENTS = (0, 0, 0, 1, 2, 2, 5, 6, 3)
    nodes = len(PARENTS)

    def __init__(self, answer: Sequence[int], vocab: int) -> None:
        self._answer, self._vocab = list(answer), vocab

    def start(
        self, prompt: Tensor, lengths: Tensor, out: TargetOut, capacity: int, generators: Sequence[torch.Generator]
    ) -> None:
        self._place = self._round = 0

    def propose(self, root: Tensor) -> Tree:
        a, b, c, d = [*self._answer[self._place + 1 :], 0, 0, 0, 0][:4]
        wrong = [(x + 1) % self._vocab for x in (a, b, c, d)]
        first = (a + 2) % self._vocab if self._round % 3 == 1 else a
        third = wrong[2] if self._round % 3 == 2 else c
        nodes = [int(root), wrong[0], first, b, wrong[1], b, third, wrong[3], c]
        tokens, parents = torch.tensor([nodes]).to(root.device), torch.tensor([self.PARENTS]).to(root.device)
        return Tree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        self._place += int(verdict.length) + 1
        self._round += 1


GROWS: dict[str, Grow] = {
    "chain": Chain(DEPTH),
    "static": McSim7b63(),
    "dynamic": DynamicTree(levels=5, width=4, budget=16),
}


def eagle(module: DraftModule, target: HFTarget, grow: str) -> Eagle:
    return Eagle(module.source, module.draft, GROWS[grow], target.spec.layers)


# ----------------------------------------------------------------------------------------------------------- float32


def test_the_package_was_answered_by_this_very_target(embedded: HFTarget) -> None:
    manifest = json.loads(packaged_data.MANIFEST.read_text("utf-8"))
    for name in ("weights_hash", "tokenizer_hash", "template_hash"):
        assert manifest[name] == vars(embedded.spec)[name], name


def test_the_packages_held_out_answers_are_what_the_target_says(
    embedded: HFTarget, asked: list[Conversation], plain: list[Run]
) -> None:
    chat = Chat(embedded.tokenizer)
    for one, said in zip(asked, plain, strict=True):
        kept = chat.encode(one.messages[:2]).ids[len(said.prompt) :][: len(said.tokens)]
        assert is_lawful(embedded, said, kept, 48, one.id)  # 48 rows answered side by side when they were made


def grown(module: DraftModule, target: HFTarget, grow: str, plain: Sequence[Run]) -> list[Run]:
    proposer = eagle(module, target, grow)
    return [run(target, proposer, expected.prompt) for expected in plain]


@pytest.fixture(scope="module")
def chained(embedded: HFTarget, plain: list[Run], trained: DraftModule) -> list[Run]:
    """The trained head's chain, which two tests look at."""
    return grown(trained, embedded, "chain", plain)


@pytest.mark.parametrize("grow", GROWS)
def test_an_untrained_head_says_what_vanilla_says(
    grow: str, embedded: HFTarget, plain: list[Run], untrained: DraftModule
) -> None:
    some = plain[:3]
    made = grown(untrained, embedded, grow, some)
    tally = check_float32(embedded, made, some, GROWS[grow].nodes, f"untrained {grow}")
    assert len(tally.rounds) > 60, "it is nearly always wrong"


@pytest.mark.parametrize("grow", GROWS)
def test_a_head_that_is_often_right_says_what_vanilla_says(
    grow: str, embedded: HFTarget, plain: list[Run], trained: DraftModule, chained: list[Run]
) -> None:
    made = chained if grow == "chain" else grown(trained, embedded, grow, plain)
    tally = check_float32(embedded, made, plain, GROWS[grow].nodes, f"trained {grow}")
    lengths = {r.accepted for r in tally.rounds}
    assert min(lengths) == 0 and max(lengths) >= 3 and len(lengths) >= 4, "runs of all lengths were to be accepted"


@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_drafts_say_what_vanilla_says(
    replacement: bool, embedded: HFTarget, plain: list[Run], trained: DraftModule
) -> None:
    grow = DrawnTree(McSim7b63(), SamplingLaw(0.7), embedded.spec.vocab, replacement)
    proposer = Eagle(trained.source, trained.draft, grow, embedded.spec.layers)
    some = plain[:2]
    made = [run(embedded, proposer, expected.prompt) for expected in some]
    tally = check_float32(embedded, made, some, grow.nodes, f"drawn, replacement {replacement}")
    assert {r.accepted for r in tally.rounds} >= {0, 1, 2}


def test_right_drafts_among_wrong_siblings_say_what_vanilla_says(embedded: HFTarget, plain: list[Run]) -> None:
    made = [run(embedded, Knowing(expected.tokens, embedded.spec.vocab), expected.prompt) for expected in plain]
    tally = check_float32(embedded, made, plain, Knowing.nodes, "knowing")
    assert {r.accepted for r in tally.rounds} >= {0, 2, 3}


def test_rows_side_by_side_say_what_each_says_alone(embedded: HFTarget, plain: list[Run], trained: DraftModule) -> None:
    """Three ragged rows in one batch, one of which ends early."""
    limit, some, proposer = 16, plain[:3], eagle(trained, embedded, "dynamic")
    width = max(len(r.prompt) for r in some)
    ids = torch.tensor([r.prompt + [0] * (width - len(r.prompt)) for r in some], device=embedded.device)
    end = some[1].tokens[5]
    decoded = decode(
        embedded.open(3, width + limit + proposer.nodes + 1, proposer.needs | Needs(logits=True)),
        proposer,
        SamplingLaw(),
        ExactVerifier(),
        ids,
        torch.tensor([len(r.prompt) for r in some], device=embedded.device),
        max_new_tokens=limit,
        end_tokens=[end],
        context_limit=embedded.spec.max_positions,
        generators=[torch.Generator() for _ in some],
    )
    for expected, made in zip(some, decoded, strict=True):
        until = [*expected.tokens[:limit], end].index(end) + 1
        assert is_lawful(embedded, expected, made.tokens, 3 * proposer.nodes, "batch", min(until, limit))
    assert decoded[1].ended == "end" and decoded[0].ended == "length"


def test_the_first_of_several_end_tokens_ends_a_round_of_accepted_drafts(
    embedded: HFTarget, plain: list[Run], trained: DraftModule
) -> None:
    expected = plain[0]
    ends = expected.tokens[17], expected.tokens[9], 0
    first = min(expected.tokens.index(end) for end in ends if end in expected.tokens)
    for proposer in (Knowing(expected.tokens, embedded.spec.vocab), eagle(trained, embedded, "chain")):
        made = run(embedded, proposer, expected.prompt, ends=ends)
        assert made.decoded.ended == "end"
        assert made.tokens == expected.tokens[: first + 1]
        assert sum(r.emitted for r in made.decoded.rounds) == first, "the prefill's token is no round's"


@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_no_answer_is_longer_than_it_may_be(limit: int, embedded: HFTarget, plain: list[Run]) -> None:
    expected = plain[1]
    made = run(embedded, Knowing(expected.tokens, embedded.spec.vocab), expected.prompt, limit=limit)
    assert made.tokens == expected.tokens[:limit] and made.decoded.ended == "length"


def test_runs_of_one_seed_are_equal_at_temperature_1(
    embedded: HFTarget, plain: list[Run], trained: DraftModule
) -> None:
    said = [
        run(embedded, eagle(trained, embedded, "static"), plain[0].prompt, limit=20, law=SamplingLaw(1.0), seed=seed)
        for seed in (3, 3, 4)
    ]
    assert said[0].decoded.tokens == said[1].decoded.tokens
    assert said[0].decoded.rounds == said[1].decoded.rounds
    assert said[0].tokens != said[2].tokens


# ---------------------------------------------------------------------------------------------------------- bfloat16


@pytest.fixture(scope="module")
def half(embedded: HFTarget) -> HFTarget:
    return TargetChoice().load(torch.bfloat16)


@pytest.mark.parametrize("grow", GROWS)
def test_in_bfloat16_every_token_is_the_best_but_for_rounding(
    grow: str, half: HFTarget, plain: list[Run], trained: DraftModule
) -> None:
    tally, short, ties = Tally(), 0.0, 0
    for expected in plain[:2]:
        made = run(half, eagle(trained, half, grow), expected.prompt, limit=24)
        alone = one_row(half, made.prompt, made.tokens)
        tally.add(made, alone)
        chosen = alone.gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
        short = max(short, float((alone.amax(1) - chosen).max()))
        ties += sum(gap(row) == 0 for row in alone)
    print(f"bfloat16 {grow}: {tally}; chosen at most {short:.2g} below the best; {ties} of 48 tokens at an exact tie")
    assert short <= tally.noise
    assert tally.noise < NOISE[torch.bfloat16]


# ------------------------------------------------------------------------------------------------------ the hit table


def test_the_walked_hit_table_is_the_chain_decoder(
    embedded: HFTarget, chained: list[Run], trained: DraftModule
) -> None:
    batch = packed(chained, embedded.device)
    reading = read_hits(trained, [batch])
    assert len(reading.answers) == len(chained)
    agreed, start = 0, 0
    for walked, made in zip(reading.answers, chained, strict=True):
        ours = list(made.decoded.rounds)
        place = first_difference(walked, ours)
        agreed += len(ours) if place is None else place
        if place is not None:
            anchor = start + len(made.prompt) - 1 + sum(r.emitted for r in ours[:place])
            draft, target = gaps(trained, embedded, batch, anchor, min(walked[place].accepted, ours[place].accepted))
            print(f"round {place} differs: the draft's top-2 gap is {draft:.2g}, the target's {target:.2g}")
            assert min(draft, target) < NOISE[torch.float32]
        start += len(made.prompt) + len(made.tokens)
    print(
        f"walk and decoder agree on {agreed} rounds, {sum(r.accepted for w in reading.answers for r in w)} drafts hit"
    )
    assert agreed > 30


def gaps(module: DraftModule, target: HFTarget, batch: Batch, t: int, s: int) -> tuple[float, float]:
    """Top-2 gaps of the draft at row t and step s, and of its teacher."""
    with torch.no_grad():
        _, steps = module.run(batch)
        draft = module.draft.logits(steps[s].head_in[0, t : t + 1], s)[0]
        teacher = target.features(batch, Needs(logits=True)).logits[0, t + 1 + s]
    return gap(draft), gap(teacher)
