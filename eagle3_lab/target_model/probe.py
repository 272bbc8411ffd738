"""Compare a target's trees and packed documents with plain runs of the model itself, in numbers.

Configuration checks miss cases (a family that reads positions from slot order, a head with a scale of another name);
numbers do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_lab.errors import UserError
from eagle3_lab.target_model.decodable import forward_in_one_line
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Batch, Needs, Tree, Verdict

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@torch.inference_mode()
def probe(target: HFTarget) -> float:
    """Compare, on a fixed prompt (longer than the window of layers that have one), tree scores with each path alone,
    before and after compaction, our head with the model's own logits, and a packed row of two documents with each
    document alone. Return the largest difference relative to the largest logit.

    Raises:
        UserError: the difference exceeds what the dtype's rounding explains, the states between the blocks are not one
            vector a token, or the model's code does not run this way.
    """
    with forward_in_one_line(target.spec.name):
        worst = max(_trees(target), _packed(target))
    if not worst <= _TOLERANCE[target.dtype]:
        raise UserError(
            f"target {target.spec.name}: scores of a tree differ from a plain run by {worst:.2g} of the largest logit; "
            "this model cannot be decoded by trees here (attention or head of an unknown kind)"
        )
    return worst


def _trees(target: HFTarget) -> float:
    """The largest relative difference between a tree's scores and plain runs of its paths."""
    device, vocab = target.device, target.spec.vocab
    draw = torch.Generator().manual_seed(0)
    length = 7 if target.window is None else max(min(target.window + 3, target.spec.max_positions - 9), 1)
    prompt = torch.randint(vocab, (1, length), generator=draw).to(device)
    tokens = torch.randint(vocab, (1, 5), generator=draw).to(device)
    tree = Tree(tokens, torch.tensor([[0, 0, 0, 2, 3]], device=device), torch.ones_like(tokens, dtype=torch.bool))
    paths = [[0, 1], [0, 2, 3, 4]]

    session = target.open(1, prompt.shape[1] + 2 * tokens.shape[1], Needs(logits=True))
    session.prefill(prompt, torch.tensor([prompt.shape[1]], device=device))
    first = session.score(tree).logits
    kept = torch.tensor([[0, 2, 3]], device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    session.commit(Verdict(kept, zero + 2, zero))
    second = session.score(tree).logits
    committed = torch.cat((prompt, tokens[:, [0, 2, 3]]), dim=1)

    pairs = []
    for context, scored in ((prompt, first), (committed, second)):
        assert scored is not None
        for path in paths:
            plain = target.model(torch.cat((context, tokens[:, path]), dim=1)).logits[0, -1]
            pairs.append((scored[0, path[-1]], plain))
    return _share(target, pairs)


def _packed(target: HFTarget) -> float:
    """The largest relative difference between two documents packed in a row and each of them alone."""
    spec, draw = target.spec, torch.Generator().manual_seed(1)
    lengths = [min(6, spec.max_positions), min(4, spec.max_positions)]
    documents = [torch.randint(spec.vocab, (1, n), generator=draw).to(target.device) for n in lengths]
    number = torch.cat([torch.full_like(one, i) for i, one in enumerate(documents)], dim=1)
    position = torch.cat([torch.arange(n, device=target.device)[None] for n in lengths], dim=1)
    ids = torch.cat(documents, dim=1)
    needs = Needs(tuple(range(spec.layers + 1)), logits=True)
    out = target.features(Batch(ids, torch.zeros_like(ids, dtype=torch.bool), position, number), needs)
    widths = {tuple(tap.shape) for tap in out.taps} - {(*ids.shape, spec.hidden)}
    if widths:
        raise UserError(
            f"target {spec.name}: the states between its blocks have shape {min(widths)}, "
            f"{(*ids.shape, spec.hidden)} is needed; a decoder with one state a token would be right"
        )
    assert out.logits is not None
    packed = out.logits[0].split(lengths)
    return _share(target, [(packed[i], target.model(one).logits[0]) for i, one in enumerate(documents)])


def _share(target: HFTarget, pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference between ours and plain logits, as a share of the largest plain one."""
    worst, scale = 0.0, 1e-6
    for ours, plain in pairs:
        if not bool(plain.isfinite().all()):  # which no comparison would tell: NaN is not larger than anything
            raise UserError(f"target {target.spec.name}: its logits are not finite, so its weights are damaged")
        worst = max(worst, float((plain.double() - ours.double()).abs().max()))
        scale = max(scale, float(plain.abs().max()))
    return worst / scale
