"""The decoder: prefill, then rounds of propose, score, judge, commit, observe. It knows no method by name.

Between rounds all tokens but the last emitted one, the root, are committed. A row that has ended rides along frozen
until all have: it keeps nothing, so its cache does not grow. One host synchronisation a round, after the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lab.decode.rounds import Block, block
from eagle3_lab.decode.timing import Clock
from eagle3_lab.decode.trees import cut, extent, narrow, root_only
from eagle3_lab.errors import UserError
from eagle3_lab.interfaces import Law, Proposer, Session, Verifier
from eagle3_lab.types import PADDING, Decoded, Round, TargetOut, Tree, Verdict

OnTokens = Callable[[int, Sequence[int], int], None]
"""Called as ``(b, tokens, accepted)`` with a piece of row b's text: its first ``accepted`` tokens were drafts, what
follows (one token, or none where the round was cut) is the target's own."""


@torch.inference_mode()
def decode(
    session: Session,
    proposer: Proposer,
    law: Law,
    verifier: Verifier,
    prompt: Int[Tensor, "B L"],
    lengths: Int[Tensor, " B"],
    *,
    max_new_tokens: int,
    end_tokens: Sequence[int],
    context_limit: int,
    generators: Sequence[torch.Generator],
    on_tokens: OnTokens | None = None,
    clock: Clock | None = None,
) -> list[Decoded]:
    """Answer right-padded prompts, one :class:`Decoded` a row.

    A row ends with the first of ``end_tokens`` (which it includes), with ``max_new_tokens`` tokens ("length"), or where
    prompt and answer fill ``context_limit`` positions ("context"); no token past that is fed to the target. Row b draws
    from ``generators[b]`` alone, and its answer does not depend on the other rows. ``on_tokens`` is called
    with every piece of text as it is emitted. ``clock`` books prefill (the proposer's start included), draft (propose,
    observe), verify (score, law, verify, commit) and host (the rest); a batch's seconds are shared evenly by its rows,
    so that sums over answers are wall time.

    A draft is made only for rows whose root's index in the text is below ``proposer.positions``. Rows at or beyond it
    are decoded plainly, with the root and padding for a tree; once no living row is below it the proposer is neither
    asked nor told any more.

    ``session`` must be fresh, with :func:`room` for the tokens of a row.

    Raises UserError for an empty prompt, for one that leaves no room in the context, and where the target's logits are
    NaN; ValueError for ``max_new_tokens`` < 1 and a wrong number of generators.
    """
    clock = clock or Clock()
    clock.start()
    rows = _rows(lengths.tolist(), prompt.shape[1], max_new_tokens, context_limit)
    if len(generators) != len(rows):
        raise ValueError(f"generators must be one a row: {len(rows)} rows, got {len(generators)}")
    capacity = room(prompt.shape[1], max_new_tokens, context_limit, proposer)
    state = _State(prompt, lengths, capacity, [row.limit for row in rows])
    ends = torch.tensor(list(end_tokens), dtype=torch.long, device=prompt.device)

    def judge(tree: Tree, out: TargetOut) -> tuple[Block, list[list[int]]]:
        assert out.logits is not None, "the target gives no logits"
        choice = law.certain(out.logits, state.ids, tree)
        verdict = None if choice is None else verifier.follow(choice, tree)
        if verdict is None:
            verdict = verifier(law.probs(out.logits, state.ids, tree), tree, generators)
        piece = block(tree, verdict, ends, state.remaining)
        state.advance(tree, piece)
        return piece, _fetch(piece, out.logits, verdict)

    out = session.prefill(prompt, lengths)
    _, table = judge(root_only(state.root, 1), out)  # the prompt's last token as root: committed, and no round
    _record(rows, table, on_tokens, is_round=False)
    drafting = _drafting(rows, proposer.positions)
    if drafting:
        proposer.start(prompt, lengths, out, capacity, generators)
    clock.lap("prefill")

    while any(not row.ended for row in rows):
        tree = root_only(state.root, proposer.nodes)
        if drafting:
            tree = _within(proposer.propose(state.root), rows, state, context_limit, proposer.positions)
        clock.lap("draft")
        out = _score(session, tree)
        piece, table = judge(tree, out)
        verdict = _narrow(piece.verdict, table)
        session.commit(verdict)
        clock.lap("verify")
        _record(rows, table, on_tokens)
        drafting = _drafting(rows, proposer.positions)
        clock.lap("host")
        if drafting:
            proposer.observe(tree, verdict, out)
            clock.lap("draft")
    return [row.decoded({k: v / len(rows) for k, v in clock.seconds().items()}) for row in rows]


def room(width: int, max_new_tokens: int, context_limit: int, proposer: Proposer) -> int:
    """Slots that prompts of ``width`` tokens, their answers and a round's nodes take in a cache, a row: however long an
    answer is allowed to be, it ends with the context."""
    return width + min(max_new_tokens, context_limit) + proposer.nodes + 1


class _State:
    """The device's side of B answers: committed ``ids`` (PADDING behind), their ``length``, which is the root's index
    in the text, the ``root``, and how many tokens may still come."""

    def __init__(
        self, prompt: Int[Tensor, "B L"], lengths: Int[Tensor, " B"], capacity: int, limits: Sequence[int]
    ) -> None:
        before_root = torch.arange(prompt.shape[1], device=prompt.device) < lengths[:, None] - 1
        self.ids = prompt.new_full((prompt.shape[0], capacity + 1), PADDING)  # the last column takes what is dropped
        self.ids[:, : prompt.shape[1]] = torch.where(before_root, prompt, PADDING)
        self.length = lengths - 1
        self.root = prompt.gather(1, self.length[:, None])[:, 0]
        self.remaining = torch.tensor(limits, device=prompt.device)

    def advance(self, tree: Tree, piece: Block) -> None:
        """Commit a round's text but its last token, which becomes the root."""
        path = piece.verdict.path
        slot = self.length[:, None] + torch.arange(path.shape[1], device=path.device)
        slot = torch.where(path == PADDING, self.ids.shape[1] - 1, slot)
        kept = tree.tokens.gather(1, path.clamp(min=0)).masked_fill(path == PADDING, PADDING)
        self.ids.scatter_(1, slot, kept)
        self.length = self.length + piece.emitted
        self.root = piece.verdict.bonus
        self.remaining = torch.where(piece.ended, 0, self.remaining - piece.emitted)


@dataclass
class _Row:
    """The host's side of one answer; at most ``limit`` tokens, at which it ends for the reason ``full``."""

    prompt: int
    limit: int
    full: str
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    ended: str = ""

    @property
    def root(self) -> int:
        """The root's index in the text."""
        return self.prompt + len(self.tokens) - 1

    def decoded(self, seconds: dict[str, float]) -> Decoded:
        return Decoded(tuple(self.tokens), tuple(self.rounds), self.ended, seconds)


def _rows(lengths: list[int], width: int, max_new_tokens: int, context_limit: int) -> list[_Row]:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    for b, length in enumerate(lengths):
        if length < 1:
            raise UserError(f"prompt {b} of the batch is empty; it needs at least one token")
        if length >= context_limit:
            raise UserError(
                f"prompt {b} of the batch has {length} tokens, which leaves no room for an answer in the target's "
                f"context of {context_limit}; shorten it to at most {context_limit - 1}"
            )
        if length > width:
            raise ValueError(f"lengths must be at most the prompts' width {width}, got {length} in row {b}")
    room = [context_limit - length for length in lengths]
    return [
        _Row(n, min(max_new_tokens, r), "context" if r < max_new_tokens else "length")
        for n, r in zip(lengths, room, strict=True)
    ]


def _drafting(rows: list[_Row], positions: int | None) -> bool:
    """Whether some living row may still be drafted for."""
    return any(not row.ended and (positions is None or row.root < positions) for row in rows)


def _score(session: Session, tree: Tree) -> TargetOut:
    """Scores of all N places. Padding behind the last node is not scored where the host can see that for nothing: its
    rows are zeros, which nobody reads."""
    nodes, real = tree.tokens.shape[1], extent(tree)
    if real == nodes:
        return session.score(tree)
    out = session.score(narrow(tree, real))

    def padded(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, 0, 0, nodes - real))

    return TargetOut(
        taps=tuple(padded(tap) for tap in out.taps),
        top=None if out.top is None else padded(out.top),
        logits=None if out.logits is None else padded(out.logits),
    )


def _within(tree: Tree, rows: list[_Row], state: _State, context_limit: int, positions: int | None) -> Tree:
    """The tree without nodes at positions past the context, and its root alone where the proposer's end. Decided on
    the host, so that trees far from either end cost nothing."""
    furthest = max(row.root for row in rows)
    if furthest + tree.tokens.shape[1] <= context_limit and (positions is None or furthest < positions):
        return tree
    room = context_limit - 1 - state.length
    if positions is not None:
        room = torch.where(state.length < positions, room, 0)
    return cut(tree, room)


def _fetch(piece: Block, logits: Float[Tensor, "B N V"], verdict: Verdict) -> list[list[int]]:
    """The one read from the device: emitted, judged, accepted, overrun, ended, and the block's tokens of each row.

    Raises UserError where the logits that the round's last token was drawn from are NaN."""
    last = verdict.path.gather(1, verdict.length[:, None])[..., None].expand(-1, 1, logits.shape[-1])
    broken = logits.gather(1, last).isnan().any(-1)[:, 0] & (piece.emitted > 0)
    counts = (broken.long(), piece.emitted, piece.judged, piece.accepted, piece.overrun, piece.ended.long())
    table = torch.cat((torch.stack(counts, dim=1), piece.tokens), dim=1).tolist()
    for b, row in enumerate(table):
        if row[0]:
            raise UserError(
                f"the target's logits are NaN in row {b} of the batch; if its dtype is float16, use bfloat16 or float32"
            )
    return [row[1:] for row in table]


def _narrow(verdict: Verdict, table: list[list[int]]) -> Verdict:
    """No wider than the longest path: what is committed and observed has this width."""
    return replace(verdict, path=verdict.path[:, : max(emitted for emitted, *_ in table)])


def _record(
    rows: list[_Row],
    table: list[list[int]],
    on_tokens: OnTokens | None,
    is_round: bool = True,
) -> None:
    for b, (row, (emitted, judged, accepted, overrun, ended, *tokens)) in enumerate(zip(rows, table, strict=True)):
        if row.ended:
            continue
        row.tokens += tokens[:emitted]
        if is_round:
            row.rounds.append(Round(judged, accepted, emitted, overrun))
        if ended:
            row.ended = "end"
        elif len(row.tokens) == row.limit:
            row.ended = row.full
        if on_tokens is not None:
            on_tokens(b, tuple(tokens[:emitted]), accepted)
