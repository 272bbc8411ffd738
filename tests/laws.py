"""What any draft head obeys, as functions to call on one of your own (README, "Adding a method", step 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import Context, DraftModel, Proposer
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.training.module import DraftModule
from eagle3_lab.types import Batch, Needs, Rows


class Growing(Context):
    """Decoding on one sequence without a cache's tricks: new rows see every stored key and, causally, one another."""

    def __init__(self) -> None:
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        if layer in self.stored:
            k = torch.cat((self.stored[layer][0], k), dim=2)
            v = torch.cat((self.stored[layer][1], v), dim=2)
        self.stored[layer] = (k, v)
        groups = q.shape[1] // k.shape[1]
        past = k.shape[2] - q.shape[2]
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(past)
        scores = q @ k.repeat_interleave(groups, dim=1).transpose(2, 3) / q.shape[-1] ** 0.5
        return scores.masked_fill(~sees, float("-inf")).softmax(-1) @ v.repeat_interleave(groups, dim=1)


@torch.no_grad()
def drafts_as_serially(
    unroll: Unroll, draft: DraftModel, features: Tensor, batch: Batch, tolerance: float = 1e-10
) -> None:
    """The parallel unroll of one document gives at every anchor what a decoder drafts there: it reads the text up to
    the anchor's token, then goes on from the draft's own output."""
    rows, depth = batch.ids.shape[1], unroll.depth
    parallel = [out.head_in for out in unroll(draft, features, batch)]
    for anchor in range(rows - depth - 1):
        context = Growing()
        carry, ids = draft.start(features[:, : anchor + 1]), batch.ids[:, 1 : anchor + 2]
        position = torch.arange(anchor + 1)[None]
        for s in range(depth):
            out = draft.step(carry, ids, Rows(position), s, context)
            torch.testing.assert_close(
                out.head_in[:, -1], parallel[s][:, anchor], rtol=tolerance, atol=tolerance, msg=f"row {anchor} step {s}"
            )
            assert isinstance(out.carry, Tensor)
            carry, ids = out.carry[:, -1:], batch.ids[:, anchor + 2 + s, None]
            position = position[:, -1:] + 1


def every_parameter_learns(module: DraftModule, batch: Batch) -> None:
    """Each trained parameter gets a gradient from one batch, and the frozen target none."""
    module.zero_grad()
    module.run(batch)[0].total.backward()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name
    assert all(parameter.grad is None for parameter in module._target[0].model.parameters())


def greedy_answers_are_vanillas(target: HFTarget, proposer: Proposer, prompts: Sequence[Sequence[int]]) -> None:
    """Whatever is proposed, greedy decoding says what the target says alone (exactly so in float64)."""
    for prompt in prompts:
        assert _answer(target, proposer, prompt) == _answer(target, Vanilla(), prompt)


def _answer(target: HFTarget, proposer: Proposer, prompt: Sequence[int], limit: int = 16) -> tuple[int, ...]:
    needs = proposer.needs | Needs(logits=True)
    (made,) = decode(
        target.open(1, len(prompt) + limit + proposer.nodes + 1, needs),
        proposer,
        SamplingLaw(),
        ExactVerifier(),
        torch.tensor([list(prompt)]),
        torch.tensor([len(prompt)]),
        max_new_tokens=limit,
        end_tokens=target.spec.end_tokens,
        context_limit=target.spec.max_positions,
        generators=[torch.Generator().manual_seed(0)],
    )
    return made.tokens
