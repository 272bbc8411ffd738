"""Typical acceptance: keep what the target finds plausible, whether or not it would have said it. Lossy.

A candidate x below a node of law p is plausible where p(x) > min(epsilon, alpha exp(-H(p))), H the entropy in nats: a
target that is sure demands much, one that is not demands little. The longest plausible path is kept, among equals the
likelier, then the lower one. The bonus is drawn from the plausible part of the last node's law. At temperature 0 a law
is one-hot, and all this is greedy matching.

Source: Medusa (arXiv 2401.10774) section 2.3.1; FasterDecoding/Medusa 0bfdcd2 medusa/model/medusa_model.py:244-247
(epsilon 0.09, alpha 0.3; the defaults of its helper functions are swapped).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eagle3_lab.decode.verify import Uniforms, follow
from eagle3_lab.interfaces import Verifier
from eagle3_lab.types import PADDING, Tree, Verdict


class TypicalVerifier(Verifier):
    """Keeps plausible candidates; the output does not follow the target's law.

    Args:
        epsilon: a probability above this is always plausible.
        alpha: share of exp(-entropy) that a probability must exceed.

    Raises:
        ValueError: for a value outside (0, 1], or a tree with drawn candidates, whose law this rule does not ask for.
    """

    lossless = False
    judges_drawn = False

    def __init__(self, epsilon: float = 0.09, alpha: float = 0.3) -> None:
        for name, value in (("epsilon", epsilon), ("alpha", alpha)):
            if not 0 < value <= 1:
                raise ValueError(f"verifier.{name} must be in (0, 1], got {value}")
        self.epsilon, self.alpha = epsilon, alpha

    def __call__(self, p: Float[Tensor, "B N V"], tree: Tree, generators: Sequence[torch.Generator]) -> Verdict:
        """The verdict. Takes one uniform a row."""
        if tree.q is not None:
            raise ValueError("typical acceptance judges fixed candidates, and this tree's were drawn")
        likely, plausible = self._judge(p, tree)
        index = torch.arange(tree.tokens.shape[1], device=p.device)
        sees = tree.visible()
        reached = (plausible[:, None, :] | ~sees).all(-1) & (tree.parents != PADDING)
        depth = torch.where(reached, sees.sum(-1), 0)
        path_likely = torch.where(sees, likely[:, None, :], 0.0).sum(-1)
        best = (depth == depth.amax(-1, keepdim=True)) & reached
        last = torch.where(best, path_likely, -torch.inf).argmax(-1)
        walked = sees.gather(1, last[:, None, None].expand(-1, 1, len(index)))[:, 0]
        path = torch.where(walked, index, len(index)).sort(-1).values
        law = p.gather(1, last[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]
        law = torch.where(law > self._threshold(law)[:, None], law, 0.0)
        bonus = Uniforms.draw(generators, 1, p.device).pick(law)
        return Verdict(path.masked_fill(path == len(index), PADDING), walked.sum(-1) - 1, bonus)

    def follow(self, choice: Int[Tensor, "B N"], tree: Tree) -> Verdict | None:
        """Of a law that is one-hot the certain token alone is plausible."""
        return None if tree.q is not None else follow(choice, tree)

    def _judge(self, p: Tensor, tree: Tree) -> tuple[Float[Tensor, "B N"], Bool[Tensor, "B N"]]:
        """Log-probability of every node's token under its parent's law, 0 for the root, and whether it is plausible."""
        above = tree.parents.clamp(min=0)
        laws = p.flatten(0, 1)
        rows = (torch.arange(len(p), device=p.device)[:, None] * p.shape[1] + above).flatten()
        prob = laws[rows, tree.tokens.flatten()].view_as(tree.tokens)
        plausible = (prob > self._threshold(p).gather(1, above)) & tree.candidate
        likely = prob.clamp(min=torch.finfo(prob.dtype).tiny).log()
        likely[:, 0], plausible[:, 0] = 0.0, True
        return likely, plausible

    def _threshold(self, p: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
        """Never above the law's maximum, so that something is always plausible."""
        entropy = -torch.xlogy(p, p).sum(-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.epsilon)
