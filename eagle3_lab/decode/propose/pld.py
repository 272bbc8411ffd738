"""Prompt lookup: what followed the last tokens when they stood in the text before is proposed again. No model drafts.

Source: Saxena 2023, prompt lookup decoding; defaults of Spec-Bench (hemingkx/Spec-Bench model/pld/pld.py:15-47). Where
nothing is found Spec-Bench proposes one arbitrary token; here nothing is proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab.decode.tree_shapes import MOST_LEVELS, require_size
from eagle3_lab.decode.trees import chain
from eagle3_lab.interfaces import Proposer
from eagle3_lab.types import PADDING, TargetOut, Tree, Verdict


class PromptLookup(Proposer):
    """A chain of fixed candidates, copied from the text so far (prompt and answer alike, the root included).

    The text's last ``max_ngram`` tokens are looked up in the text before them; where they never stood, the last
    ``max_ngram - 1``, and so on down to one. Of several occurrences the earliest counts. Nothing found: the root alone.

        text a b c d e x b c, max_ngram 3:  x b c never stood before; b c did -> propose d e x b c

    All rows are looked up at once on the device, with no read by the host.

    Args:
        max_ngram: longest suffix that is looked up, in tokens.
        length: drafts proposed, at most.
        full: an occurrence counts only if ``length`` tokens follow it, as in Spec-Bench. False: a shorter
            continuation, one token at least, counts too, as in transformers.

    Raises:
        ValueError: ``max_ngram`` or ``length`` outside 1 .. `MOST_LEVELS`.
    """

    _ids: Int[Tensor, "B S"]  # the text, PADDING behind
    _root: Int[Tensor, " B"]  # the root's index in it

    def __init__(self, max_ngram: int = 3, length: int = 10, full: bool = True) -> None:
        require_size("max_ngram", max_ngram, MOST_LEVELS)
        require_size("length", length, MOST_LEVELS)
        self.nodes = length + 1
        self._max_ngram, self._full = max_ngram, full

    def start(
        self,
        prompt: Int[Tensor, "B L"],
        lengths: Int[Tensor, " B"],
        out: TargetOut,
        capacity: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        width = prompt.shape[1]
        inside = torch.arange(width, device=prompt.device) < lengths[:, None]
        self._ids = prompt.new_full((len(prompt), capacity), PADDING)
        self._ids[:, :width] = torch.where(inside, prompt, PADDING)
        self._root = lengths

    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        self._ids.scatter_(1, self._root[:, None], root[:, None])
        after, found = self._occurrence()
        drafts = self.nodes - 1
        index = after[:, None] + torch.arange(drafts, device=root.device)
        count = torch.where(found, (self._root + 1 - after).clamp(max=drafts), 0)
        copied = self._ids.gather(1, index.clamp(max=self._ids.shape[1] - 1))
        return chain(torch.cat((root[:, None], copied), dim=1), count)

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        kept = verdict.path != PADDING
        slot = self._root[:, None] + torch.arange(kept.shape[1], device=kept.device)
        tokens = tree.tokens.gather(1, verdict.path.clamp(min=0)).masked_fill(~kept, PADDING)
        self._ids.scatter_(1, slot, tokens)
        self._root = self._root + kept.sum(1)

    def _occurrence(self) -> tuple[Tensor, Tensor]:
        """Where the continuation of the longest, earliest occurrence begins, and whether there is one."""
        ids, root = self._ids, self._root[:, None]
        width = ids.shape[1]
        end = torch.arange(width, device=ids.device)  # an occurrence's last token
        alike = torch.ones_like(ids, dtype=torch.bool)
        run = torch.zeros_like(ids)  # how many tokens up to here equal the text's last ones
        for back in range(min(self._max_ngram, width)):
            wanted = ids.gather(1, (root - back).clamp(min=0))
            stood = torch.zeros_like(alike)
            stood[:, back:] = ids[:, : width - back] == wanted
            alike = alike & stood
            run = run + alike
        behind = self.nodes - 1 if self._full else 1
        run = torch.where(end + behind <= root, run, 0)
        best = (run * width - end).argmax(1)  # the longest run, of equals the earliest
        return best + 1, run.gather(1, best[:, None])[:, 0] > 0
