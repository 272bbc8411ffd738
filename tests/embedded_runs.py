"""Decoding the embedded target with every logit recorded that a token was chosen from, and the law such runs obey.

float32, T = 0: an answer is vanilla's, or differs first where vanilla's two best logits lie closer than twice the
difference between a forward of one row and one of n rows, measured on that prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.trees import root_only
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.interfaces import Proposer, Session
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import PADDING, Decoded, Needs, Round, TargetOut, Tree, Verdict

TOKENS = 40
"""Longest answer, unless said otherwise."""

NOISE = {torch.float32: 5e-4, torch.bfloat16: 2.0}
"""Largest difference of logits (of size 30) that rounding explains; a wrong mask or position makes several units."""


class Recorded(Session):
    """One sequence's session, with the logits that every emitted token was chosen from."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rows: list[Tensor] = []

    @property
    def lengths(self) -> Tensor:
        return self._session.lengths

    def prefill(self, ids: Tensor, lengths: Tensor) -> TargetOut:
        out = self._session.prefill(ids, lengths)
        self.rows.append(out.logits[0].float().cpu())
        return out

    def score(self, tree: Tree, done: int = 0) -> TargetOut:
        self._last = self._session.score(tree, done)
        return self._last

    def commit(self, verdict: Verdict) -> None:
        path = verdict.path[0]
        self.rows.append(self._last.logits[0, path[path != PADDING]].float().cpu())
        self._session.commit(verdict)


@dataclass(frozen=True)
class Run:
    """An answer, and the logits [tokens, V] its tokens were chosen from."""

    prompt: list[int]
    decoded: Decoded
    rows: Tensor

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.decoded.tokens


def run(
    target: HFTarget,
    proposer: Proposer,
    prompt: list[int],
    *,
    limit: int = TOKENS,
    ends: Sequence[int] | None = None,
    law: SamplingLaw | None = None,
    seed: int = 0,
) -> Run:
    session = Recorded(target.open(1, len(prompt) + limit + proposer.nodes + 1, proposer.needs | Needs(logits=True)))
    (decoded,) = decode(
        session,
        proposer,
        law or SamplingLaw(),
        ExactVerifier(),
        torch.tensor([prompt], device=target.device),
        torch.tensor([len(prompt)], device=target.device),
        max_new_tokens=limit,
        end_tokens=target.spec.end_tokens if ends is None else ends,
        context_limit=target.spec.max_positions,
        generators=[torch.Generator().manual_seed(seed)],
    )
    rows = torch.cat(session.rows)
    assert len(rows) == len(decoded.tokens)
    return Run(prompt, decoded, rows)


def one_row(target: HFTarget, prompt: list[int], tokens: Sequence[int]) -> Tensor:
    """Logits [tokens, V] along an answer, one row a forward."""
    session = target.open(1, len(prompt) + len(tokens) + 1, Needs(logits=True))
    ids = torch.tensor([prompt], device=target.device)
    rows = [session.prefill(ids, torch.tensor([len(prompt)], device=target.device)).logits[0]]
    zero = torch.zeros(1, dtype=torch.long, device=target.device)
    for token in tokens[:-1]:
        rows.append(session.score(root_only(zero + token, 1)).logits[0])
        session.commit(Verdict(zero[:, None], zero, zero))
    return torch.cat(rows).float().cpu()


def rounding(target: HFTarget, text: list[int], nodes: int) -> float:
    """The largest difference of the logits behind ``text`` between forwards of one row and of ``nodes`` rows."""
    session = target.open(1, len(text) + nodes, Needs(logits=True))
    before = torch.tensor([text[:-1]], device=target.device)
    session.prefill(before, torch.tensor([before.shape[1]], device=target.device))
    root = torch.tensor(text[-1:], device=target.device)
    one, many = (session.score(root_only(root, n)).logits[0, 0].float() for n in (1, nodes))
    return float((one - many).abs().max())


def gap(logits: Tensor) -> float:
    best = logits.float().topk(2).values
    return float(best[0] - best[1])


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    pairs = zip(left, right, strict=False)
    found = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return found if found is not None or len(left) == len(right) else min(len(left), len(right))


def is_lawful(
    target: HFTarget, plain: Run, tokens: Sequence[int], nodes: int, name: str, length: int | None = None
) -> bool:
    """Whether ``tokens`` are vanilla's first ``length`` (None: all), or differ first at a near tie."""
    place = first_difference(plain.tokens[:length], tokens)
    if place is None:
        return True
    top, noise = gap(plain.rows[place]), rounding(target, plain.prompt + list(plain.tokens[:place]), nodes)
    print(f"{name}: first difference at token {place}, top-2 gap {top:.2g}, one-row/{nodes}-row difference {noise:.2g}")
    return top < 2 * noise


@dataclass
class Tally:
    """What a method did over several answers."""

    rounds: list[Round] = field(default_factory=list)
    noise: float = 0.0

    def add(self, made: Run, reference: Tensor) -> None:
        """``reference``: one-row logits of the same text, up to its first difference and the row there."""
        self.rounds += made.decoded.rounds
        count = min(len(reference), len(made.rows))
        self.noise = max(self.noise, float((made.rows[:count] - reference[:count]).abs().max()))

    def __str__(self) -> str:
        accepted, emitted = sum(r.accepted for r in self.rounds), sum(r.emitted for r in self.rounds)
        rounds = f"{len(self.rounds)} rounds, {accepted} drafts accepted, tau {emitted / len(self.rounds):.2f}"
        return f"{rounds}, logits differ by at most {self.noise:.2g}"


def check_float32(target: HFTarget, made: Sequence[Run], plain: Sequence[Run], nodes: int, name: str) -> Tally:
    """The law, answer by answer; and every row that a token was chosen from is vanilla's but for rounding."""
    tally = Tally()
    for one, expected in zip(made, plain, strict=True):
        assert is_lawful(target, expected, one.tokens, nodes, name)
        place = first_difference(expected.tokens, one.tokens)
        tally.add(one, expected.rows if place is None else expected.rows[: place + 1])
        if place is None:
            assert one.decoded.ended == expected.decoded.ended
    print(f"{name}: {tally}")
    assert tally.noise < NOISE[torch.float32]
    return tally
