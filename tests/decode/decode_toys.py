"""What the decoder's tests share: a target whose every token depends on all before it, and proposers to annoy it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle3_lab.decode.loop import OnTokens, decode
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.trees import root_only
from eagle3_lab.decode.verify import ExactVerifier, Uniforms, inverse_cdf
from eagle3_lab.interfaces import Law, Proposer, Session, Verifier
from eagle3_lab.types import PADDING, Decoded, TargetOut, Tree, Verdict

STATES = 211


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stepped(state: Tensor, token: Tensor) -> Tensor:
    """The state after one more token. One wrong token changes everything that follows."""
    return (state * 31 + token * 7 + 3) % STATES


class ToyTarget(Session):
    """Logits are a table's row, chosen by a hash of the whole context. It keeps the committed tokens and nothing else,
    and refuses what a session must never be asked: a commit out of order, a token beyond the context."""

    def __init__(self, table: Tensor, context_limit: int = 10**6) -> None:
        self.table, self.context_limit = table, context_limit

    def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOut:
        batch, width = ids.shape
        self.ids = torch.full((batch, width + 200), PADDING)
        self.ids[:, :width] = torch.where(torch.arange(width) < lengths[:, None], ids, PADDING)
        self.lengths = lengths.clone()
        return TargetOut(logits=self.table[self._state()][:, None])

    def score(self, tree: Tree) -> TargetOut:
        real = tree.parents != PADDING
        position = self.lengths[:, None] + tree.depth()
        assert (position[real] < self.context_limit).all(), "a forward beyond the context"
        self.tree = tree
        states = [stepped(self._state(), tree.tokens[:, 0])]
        for i in range(1, tree.tokens.shape[1]):
            above = torch.stack(states, 1).gather(1, tree.parents[:, i : i + 1].clamp(min=0))[:, 0]
            states.append(stepped(above, tree.tokens[:, i]))
        return TargetOut(logits=self.table[torch.stack(states, 1)])

    def commit(self, verdict: Verdict) -> None:
        kept = verdict.path != PADDING
        assert torch.equal(kept.sum(1), verdict.length + 1)
        assert torch.equal(kept, kept.long().cummin(1).values.bool()), "padding inside a path"
        parents = self.tree.parents.gather(1, verdict.path.clamp(min=0))
        assert (parents[:, 1:] == verdict.path[:, :-1])[kept[:, 1:]].all(), "a path that is no path"
        tokens = self.tree.tokens.gather(1, verdict.path.clamp(min=0))
        for k in range(verdict.path.shape[1]):
            row = torch.nonzero(kept[:, k])[:, 0]
            self.ids[row, self.lengths[row]] = tokens[row, k]
            self.lengths[row] += 1

    def _state(self) -> Tensor:
        state = torch.zeros(len(self.ids), dtype=torch.long)
        for column in self.ids[:, : int(self.lengths.max())].unbind(1):
            state = torch.where(column == PADDING, state, stepped(state, column))
        return state


def table(vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(STATES, vocab, generator=seeded(seed), dtype=torch.float64)


PROMPTS = ([3, 1, 4, 1, 5], [2, 7], [1, 8, 2, 8])


def run(
    target: ToyTarget,
    proposer: Proposer,
    law: Law | None = None,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    max_new_tokens: int = 20,
    end_tokens: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    verifier: Verifier | None = None,
    on_tokens: OnTokens | None = None,
) -> list[Decoded]:
    """Decode with defaults."""
    lengths = torch.tensor([len(p) for p in prompts])
    ids = torch.full((len(prompts), int(lengths.max())), 6)  # what pads a prompt must not matter: 6 is a real token
    for b, p in enumerate(prompts):
        ids[b, : len(p)] = torch.tensor(p)
    return decode(
        target,
        proposer,
        law or SamplingLaw(),
        verifier or ExactVerifier(),
        ids,
        lengths,
        max_new_tokens=max_new_tokens,
        end_tokens=end_tokens,
        context_limit=target.context_limit,
        generators=[seeded(s) for s in (seeds if seeds is not None else range(len(prompts)))],
        on_tokens=on_tokens,
    )


def greedy(
    logits: Tensor, law: Law | None = None, prompts: Sequence[Sequence[int]] = PROMPTS, count: int = 40
) -> list[tuple[int, ...]]:
    """What the target says by itself."""
    return [d.tokens for d in run(ToyTarget(logits), Vanilla(), law, prompts=prompts, max_new_tokens=count)]


Node = tuple[int, int, bool]  # token, parent, candidate
Script = Callable[[list[int]], list[Node]]  # the true next tokens below the root -> nodes 1, 2, ...


class Scripted(Proposer):
    """Knows the truth and says of it what a script makes of it. Notes what it was told."""

    def __init__(self, script: Script, truth: Sequence[Sequence[int]], positions: int | None = None) -> None:
        self.script, self.truth, self.positions = script, truth, positions
        self.nodes = 1 + len(script([0] * 10))

    def start(
        self, prompt: Tensor, lengths: Tensor, out: TargetOut, capacity: int, generators: Sequence[torch.Generator]
    ) -> None:
        self.place = torch.zeros_like(lengths)  # of the root among the answer's tokens
        self.proposed_at: list[list[int]] = []
        self.observed = 0

    def propose(self, root: Tensor) -> Tree:
        self.proposed_at.append(self.place.tolist())
        rows = []
        for b, place in enumerate(self.place.tolist()):
            assert root[b] == self.truth[b][place]
            ahead = [*self.truth[b][place + 1 :], *[0] * 10]
            rows.append([(int(root[b]), 0, True), *self.script(ahead)])
        tokens, parents, candidate = (torch.tensor([[node[k] for node in row] for row in rows]) for k in range(3))
        return Tree(tokens, parents, candidate.bool())

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        assert out.logits is not None and out.logits.shape[1] == self.nodes
        self.place = self.place + verdict.length + 1
        self.observed += 1


VOCAB = 12


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


SCRIPTS: dict[str, Script] = {
    "always right": lambda t: [(t[i], i, True) for i in range(4)],
    "always wrong": lambda t: [(wrong(t[i]), i, True) for i in range(4)],
    "right, then wrong": lambda t: [(t[0], 0, True), (t[1], 1, True), (wrong(t[2]), 2, True), (t[3], 3, True)],
    "right only on the second child, on two levels": lambda t: [
        (wrong(t[0]), 0, True), (t[0], 0, True), (t[1], 1, True), (wrong(t[1]), 2, True), (t[1], 2, True),
        (wrong(t[2]), 5, True), (t[2], 5, True),
    ],
    "the same candidate twice, the longer path below the second": lambda t: [
        (t[0], 0, True), (t[0], 0, True), (wrong(t[1]), 1, True), (t[1], 2, True), (t[1], 2, True), (t[2], 4, True),
    ],
    "riders that carry the truth before the candidates": lambda t: [
        (t[0], 0, False), (t[1], 1, False), (t[1], 1, True), (t[0], 0, True), (t[1], 4, False), (t[1], 4, True),
    ],
    "padding that carries the truth between": lambda t: [
        (t[0], PADDING, False), (wrong(t[0]), 0, True), (t[0], PADDING, False), (t[0], 0, True), (t[1], PADDING, False),
    ],
    "nothing but padding": lambda t: [(t[0], PADDING, False), (t[1], PADDING, False)],
}  # fmt: skip


class RandomFixed(Proposer):
    """A fixed tree of tokens that nobody asked the target about: siblings, repeats and a second level."""

    PARENTS = (0, 0, 0, 0, 1, 1, 2)

    def __init__(self, vocab: int) -> None:
        self.vocab, self.nodes = vocab, len(self.PARENTS)

    def start(
        self, prompt: Tensor, lengths: Tensor, out: TargetOut, capacity: int, generators: Sequence[torch.Generator]
    ) -> None:
        self.rng = seeded(7)

    def propose(self, root: Tensor) -> Tree:
        tokens = torch.randint(self.vocab, (1, self.nodes), generator=self.rng).repeat(len(root), 1)
        tokens[:, 0] = root
        parents = torch.tensor(self.PARENTS).expand(len(root), -1)
        return Tree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        pass


class Drawing(Proposer):
    """Draws its candidates from a draft law that knows the last token only, with or without replacement."""

    def __init__(self, draft: Tensor, parents: Sequence[int], replacement: bool) -> None:
        self.draft, self.parents, self.replacement = draft, parents, replacement
        self.nodes = len(parents)

    def start(
        self, prompt: Tensor, lengths: Tensor, out: TargetOut, capacity: int, generators: Sequence[torch.Generator]
    ) -> None:
        self.generators = generators

    def propose(self, root: Tensor) -> Tree:
        chance = Uniforms.draw(self.generators, self.nodes, root.device)
        tokens, q = [root], [self.draft[root]]
        left = {0: self.draft[root]}
        for i, parent in enumerate(self.parents[1:]):
            x = inverse_cdf(left[parent], chance.uniforms[:, i])
            if not self.replacement:
                left[parent] = left[parent].scatter(1, x[:, None], 0.0)
            left[i + 1] = self.draft[x]
            tokens.append(x)
            q.append(self.draft[x])
        parents = torch.tensor(self.parents).expand(len(root), -1)
        stacked = torch.stack(tokens, 1)
        return Tree(stacked, parents, torch.ones_like(stacked, dtype=torch.bool), torch.stack(q, 1), self.replacement)

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        pass


class Gullible(Verifier):
    """Takes every first child for granted: what a biased verifier looks like to a test."""

    lossless = False

    def __call__(self, p: Tensor, tree: Tree, generators: Sequence[torch.Generator]) -> Verdict:
        batch, nodes = tree.tokens.shape
        if nodes == 1:
            return ExactVerifier()(p, root_only(tree.tokens[:, 0], 1), generators)
        path = torch.tensor([0, 1]).expand(batch, -1)
        u = Uniforms.draw(generators, 1, p.device).uniforms[:, 0]
        return Verdict(path, torch.ones(batch, dtype=torch.long), inverse_cdf(p[:, 1], u))
