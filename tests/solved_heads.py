"""Heads whose drafts on a few texts are known: random fusion and layer, the linear head solved by least squares.

Any slip between this lab and another reader of such a head, in names, shifts, norms, layer ids or maps, makes what it
drafts there meaningless, and acceptance collapses to that of a random head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.methods import Head, HeadTree, Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.tree_shapes import Chain
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import Proposer
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Batch, Decoded, Needs

STEPS = 3


def answers(target: HFTarget, proposer: Proposer, prompts: Sequence[Sequence[int]], most: int) -> list[Decoded]:
    """Greedy answers, one prompt at a time."""
    made = []
    for prompt in prompts:
        session = target.open(1, len(prompt) + most + proposer.nodes + 2, proposer.needs | Needs(logits=True))
        ids, lengths = torch.tensor([list(prompt)]), torch.tensor([len(prompt)])
        made += decode(
            session,
            proposer,
            SamplingLaw(),
            ExactVerifier(),
            ids,
            lengths,
            max_new_tokens=most,
            end_tokens=target.spec.end_tokens,
            context_limit=target.spec.max_positions,
            generators=[torch.Generator()],
        )
    return made


def chain_of(target: HFTarget, source: FusedFeature, draft: Eagle3) -> Proposer:
    """The proposer of a chain of `STEPS` greedy drafts."""
    return HeadTree(Chain(STEPS)).proposer(target.spec, Head(source, draft, target.record))


def tau(decoded: Sequence[Decoded]) -> float:
    """Tokens a round as a serving engine counts them: one and the accepted drafts, also those past an answer's end."""
    rounds = [one for answer in decoded for one in answer.rounds]
    return 1 + sum(one.accepted + one.overrun for one in rounds) / len(rounds)


@torch.no_grad()
def solved_head(
    target: HFTarget,
    source: FusedFeature,
    draft: Eagle3,
    prompts: Sequence[Sequence[int]],
    most: int,
    vocab: int,
    wrong_every: int = 0,
) -> None:
    """Build parts and solve the linear head so that every chain on the greedy answers to ``prompts``, up to ``most``
    tokens, is right; but ``wrong_every`` so many tokens of a text, the drafts of one are another token."""
    texts = [
        (len(prompt), [*prompt, *answer.tokens])
        for prompt, answer in zip(
            prompts, answers(target, Vanilla().proposer(target.spec, None), prompts, most), strict=True
        )
    ]
    needed = {token for begin, text in texts for token in text[begin:]}
    spread = torch.linspace(0, target.spec.real_vocab - 1, vocab).long().tolist()
    ids = torch.tensor(sorted({*needed, *spread}))
    torch.manual_seed(0)
    draft.build(target, source.build(target), ids)
    rows, wanted = [], []
    for begin, text in texts:
        row = torch.tensor([text])
        states = target.model(row, output_hidden_states=True).hidden_states
        taps = tuple(states[layer] for layer in source.layers(target.spec.layers))
        batch = Batch(row, torch.ones_like(row, dtype=torch.bool), torch.arange(len(text))[None], torch.zeros_like(row))
        for s, out in enumerate(Unroll(STEPS)(draft, source(taps), batch)):
            last = len(text) - 2 - s  # rows whose next token is known
            rows.append(out.head_in[0, begin - 1 : last])
            wanted.append(_spoilt(row[0], wrong_every)[begin + 1 + s :])
    matrix, tokens = torch.cat(rows).double(), torch.cat(wanted)
    assert len(matrix) <= matrix.shape[1], f"{len(matrix)} rows, {matrix.shape[1]} unknowns each: not solvable"
    hot = (ids[None] == tokens[:, None]).double()
    draft.lm_head.weight.copy_(torch.linalg.lstsq(matrix, hot).solution.T.float())


def _spoilt(text: Tensor, every: int) -> Tensor:
    """Return a text with every so-manieth token replaced by its neighbour in the text."""
    if not every:
        return text
    spoilt = text.clone()
    spoilt[every::every] = text[every - 1 : -1 : every][: len(spoilt[every::every])]
    return spoilt
