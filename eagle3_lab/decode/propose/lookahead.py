"""Lookahead decoding: the target guesses several tokens ahead at once, in parallel, and what it said is tried later.

Each round's tree holds two things below the root. A window of W columns and N - 1 levels rides along: tokens that
nobody believes yet. What the target says after the last level completes each column to an n-gram, which goes to a
pool, by its first token. And the n-grams of the pool that begin with the root, G at most, are the candidates.

W 3, N 4; the nodes by level and column, the root among them, and the same as a tree:

    level 0    0  1  2        0 - 3 - 6
    level 1    3  4  5          - 1 - 4 - 7
    level 2    6  7  8              - 2 - 5 - 8

A token sees level 0 up to its own column, and its own column above it: level 0 is a guess of the coming text, and each
column continues that text where it stands. Column j of level l is j + l positions behind the root.

Source: Fu et al., arXiv 2402.02057; hao-ai-lab/LookaheadDecoding lade/decoding.py (update_token_map,
jacobi_greedy_search_multilevel).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3_lab.decode.tree_shapes import MOST_COLUMNS, MOST_NODES, require_size
from eagle3_lab.decode.trees import merge
from eagle3_lab.decode.verify import Uniforms
from eagle3_lab.interfaces import Proposer
from eagle3_lab.types import PADDING, Needs, TargetOut, Tree, Verdict


class Lookahead(Proposer):
    """Fixed candidates out of the target's own parallel guesses; a window of non-candidates makes them.

    Level 0 begins with tokens drawn from the prompt, the other levels are filled one a round; until all are, nothing is
    proposed. Then every round each level takes the place of the one above it, and what the target said is the last:
    the tokens stay at their positions while the root moves on by one. The window's new tokens are the target's
    likeliest ones, whatever law the text is drawn from. Pool and window live on the device, with no read by the host.

    Args:
        window: columns (W).
        ngram: tokens of an n-gram, the one it is found by included (N); the window has N - 1 levels.
        guesses: n-grams kept for each first token, the longest unseen going first, and proposed at most (G).
        follows: where drafts were accepted the columns move on by as many, and new ones are drawn from the prompt, so
            that tokens keep their positions. False: they move on by one a round, as in the public code by default.
        end_tokens: not kept in the window, where they would end every column: a token of the prompt stands in.

    Raises:
        ValueError: ``window`` or ``guesses`` outside 1 .. `MOST_COLUMNS`, ``ngram`` below 2, more than `MOST_NODES`
            nodes.
    """

    needs = Needs(logits=True)
    _window: Int[Tensor, "B levels W"]  # the root's place is overwritten
    _filled: int  # levels of it that hold tokens
    _pool: Int[Tensor, "B S N"]  # n-grams, the last seen last; first token PADDING: none
    _used: int  # of its S places

    def __init__(
        self,
        window: int = 7,
        ngram: int = 5,
        guesses: int = 7,
        follows: bool = False,
        end_tokens: Sequence[int] = (),
    ) -> None:
        require_size("window", window, MOST_COLUMNS)
        require_size("guesses", guesses, MOST_COLUMNS)
        if ngram < 2 or (window + guesses) * (ngram - 1) > MOST_NODES:
            most = 1 + MOST_NODES // (window + guesses)
            raise ValueError(
                f"ngram must lie in 2 .. {most} with window {window} and guesses {guesses} (at most {MOST_NODES} nodes "
                f"a round), got {ngram}"
            )
        self.nodes = (window + guesses) * (ngram - 1)
        self._columns, self._levels, self._guesses = window, ngram - 1, guesses
        self._follows, self._end_tokens = follows, tuple(end_tokens)

    def start(
        self,
        prompt: Int[Tensor, "B L"],
        lengths: Int[Tensor, " B"],
        out: TargetOut,
        capacity: int,
        generators: Sequence[torch.Generator],
    ) -> None:
        batch, width = prompt.shape
        self._prompt, self._lengths, self._generators = prompt, lengths, generators
        self._ends = torch.tensor(self._end_tokens, dtype=torch.long, device=prompt.device)
        self._parents = self._shape(prompt.device)
        self._window, self._filled = self._drawn(), 1
        # First places of nothing, so that a search always has `guesses` to find; then those of every round.
        places = self._guesses + self._columns * (capacity - width)
        self._pool = prompt.new_full((batch, places, self._levels + 1), PADDING)
        self._used = self._guesses

    def propose(self, root: Int[Tensor, " B"]) -> Tree:
        self._window[:, 0, 0] = root
        guesses, found = self._found(root)
        window = torch.ones_like(self._window, dtype=torch.bool)
        window[:, self._filled :] = False
        drafts = found[:, :, None].expand_as(guesses).flatten(1)
        real = torch.cat((window.flatten(1), drafts), dim=1)
        tokens = torch.cat((self._window.flatten(1), guesses.flatten(1)), dim=1).masked_fill(~real, 0)
        candidate = torch.cat((torch.zeros_like(window.flatten(1)), drafts), dim=1)
        candidate[:, 0] = True
        return merge(Tree(tokens, torch.where(real, self._parents, PADDING), candidate))

    def observe(self, tree: Tree, verdict: Verdict, out: TargetOut) -> None:
        assert out.logits is not None
        levels, columns = self._filled, self._columns
        last = slice((levels - 1) * columns, levels * columns)
        said = out.logits[:, last].argmax(-1)
        drawn = self._drawn()
        is_full = levels == self._levels
        if is_full:
            alive = (verdict.path[:, :1] != PADDING) & (tree.parents[:, last] != PADDING)  # not past the context either
            self._remember(torch.cat((self._window, said[:, None]), dim=1).transpose(1, 2), alive)
        is_end = (said[..., None] == self._ends).any(-1)
        said = torch.where(is_end, drawn[:, -1], said)
        if is_full:  # levels move up, and with them every token comes one position nearer to the root
            moved = torch.cat((self._window[:, 1:], said[:, None]), dim=1)
            by = verdict.length.clamp(min=0) if self._follows else torch.zeros_like(verdict.length)
        else:
            moved = torch.cat((self._window[:, :levels], said[:, None], self._window[:, levels + 1 :]), dim=1)
            by = torch.ones_like(verdict.length)
            self._filled += 1
        column = torch.arange(columns, device=said.device) + by[:, None, None]
        kept = moved.gather(2, column.clamp(max=columns - 1).expand_as(moved))
        self._window = torch.where(column < columns, kept, drawn)

    def _shape(self, device: torch.device) -> Int[Tensor, " N"]:
        """Every node's parent where nothing is padding: the window level by level, then the guesses one by one."""
        window = self._columns * self._levels
        node = torch.arange(self.nodes, device=device)
        level_0 = (node - 1).clamp(min=0)
        chain = torch.where((node - window) % self._levels == 0, 0, node - 1)
        return torch.where(node < self._columns, level_0, torch.where(node < window, node - self._columns, chain))

    def _drawn(self) -> Int[Tensor, "B levels W"]:
        """A window of tokens drawn from each row's prompt, by the row's generator."""
        count = self._levels * self._columns
        u = Uniforms.draw(self._generators, count, self._prompt.device).uniforms
        return self._prompt.gather(1, (u * self._lengths[:, None]).long()).unflatten(1, (self._levels, self._columns))

    def _found(self, root: Int[Tensor, " B"]) -> tuple[Int[Tensor, "B G levels"], Bool[Tensor, "B G"]]:
        """What followed the root in the n-grams seen last, and which of them are none."""
        known = self._pool[:, : self._used]
        place = torch.arange(1, self._used + 1, device=root.device)
        latest = torch.where(known[..., 0] == root[:, None], place, 0).topk(self._guesses)
        index = latest.indices[..., None].expand(-1, -1, self._levels)
        return known[..., 1:].gather(1, index), latest.values > 0

    def _remember(self, grams: Int[Tensor, "B W N"], real: Bool[Tensor, "B W"]) -> None:
        """Put n-grams at the pool's end, and strike out where they stood before. The last ``guesses`` of a first token
        are then exactly what a list of that length would hold from which the longest unseen is dropped."""
        begin, self._used = self._used, self._used + grams.shape[1]
        known = self._pool[:, : self._used]
        known[:, begin:] = grams
        known[:, begin:, 0].masked_fill_(~real, PADDING)
        place = torch.arange(self._used, device=grams.device)
        again = (place[:, None] < place[begin:]).expand(len(known), -1, -1)  # (B, S, W)
        for i in range(grams.shape[2]):
            again = again & (known[:, :, None, i] == known[:, None, begin:, i])
        known[..., 0].masked_fill_(again.any(-1), PADDING)
