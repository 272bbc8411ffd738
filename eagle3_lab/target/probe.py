"""The last word on a target: a small tree, scored and compacted, against plain runs of the model itself.

Configuration checks miss cases (a family that reads positions from slot order, a head with a scale of another name);
numbers do not.
"""

from __future__ import annotations

import torch

from eagle3_lab.errors import UserError
from eagle3_lab.target.adapter import HFTarget
from eagle3_lab.types import Needs, Tree, Verdict

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@torch.inference_mode()
def probe(target: HFTarget) -> float:
    """Compare, on a fixed prompt (longer than the window of layers that have one), tree scores with each path alone,
    before and after compaction, and our head with the model's own logits. Returns the largest difference relative to
    the largest logit.

    Raises:
        UserError: the difference exceeds what the dtype's rounding explains.
    """
    device, vocab = target.device, target.spec.vocab
    draw = torch.Generator().manual_seed(0)
    length = 7 if target.window is None else min(target.window + 3, target.spec.max_positions - 9)
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

    worst, scale = 0.0, 0.0
    for context, scored in ((prompt, first), (committed, second)):
        for path in paths:
            plain = target.model(torch.cat((context, tokens[:, path]), dim=1)).logits[0, -1].double()
            worst = max(worst, float((plain - scored[0, path[-1]].double()).abs().max()))
            scale = max(scale, float(plain.abs().max()))
            if not bool(plain.isfinite().all()):  # which no comparison would tell: NaN is not larger than anything
                raise UserError(f"target {target.spec.name}: its logits are not finite, so its weights are damaged")
    share = worst / max(scale, 1e-6)
    if not share <= _TOLERANCE[target.dtype]:
        raise UserError(
            f"target {target.spec.name}: scores of a tree differ from a plain run by {share:.2g} of the largest logit; "
            "this model cannot be decoded by trees here (attention or head of an unknown kind)"
        )
    return share
