"""The data card: what a head is trained on, in numbers, and under which terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lab.data.conversations import Conversation
from eagle3_lab.data.documents import Document
from eagle3_lab.data.module import ConversationData

LOOPING = "looping answer"
QUANTILES = {"shortest": 0.0, "median": 0.5, "nine_tenths": 0.9, "longest": 1.0}


def data_card(data: ConversationData, vocabulary: Int[Tensor, " Vd"], vocab: int) -> dict[str, Any]:
    """The card as JSON.

    Args:
        data: built for its target.
        vocabulary: the draft's target ids.
        vocab: of the target.
    """
    parts = {"train": data.train, "held_out": data.held_out}
    return {
        "hash": data.hash,
        "parts": {name: _part(found) | {"rows": data.rows(found)} for name, found in parts.items() if found},
        "dropped_for_looping": _dropped_for_looping(data),
        "draft_vocabulary": {
            "size": len(vocabulary),
            "of": vocab,
            "coverage": {name: coverage(found, vocabulary, vocab) for name, found in parts.items() if found},
        },
        "sources": dict(sorted(Counter(one.source for one in _conversations(data.train)).items())),
        "licences": data.licences(),
        "stages": [str(report) for report in data.way()],
        "counts": [{"seen": report.seen} | report.counts() for report in data.way()],
    }


def card_text(card: dict[str, Any]) -> str:
    """The card for reading."""
    lines = [f"data {card['hash']}"]
    for name, part in card["parts"].items():
        sizes = f"{part['conversations']} conversations in {part['documents']} documents in {part['rows']} rows"
        share = f"{part['supervised']} supervised ({part['supervised'] / part['tokens']:.1%})"
        lines.append(f"{name}: {sizes}, {part['tokens']} tokens, {share}")
        lengths = ", ".join(f"{what.replace('_', ' ')} {value}" for what, value in part["document_tokens"].items())
        lines.append(f"  tokens a document: {lengths}")
        shares = f"cut at the token limit {part['cut']:.1%}, greedy {part['greedy']:.1%}"
        lines.append(f"  {part['answers']} answers; of the conversations {shares}")
    looping, vocabulary = card["dropped_for_looping"], card["draft_vocabulary"]
    lines.append(f"looping: {looping['count']} conversations dropped ({looping['share']:.1%})")
    covered = ", ".join(f"{value:.2%} of {name}'s" for name, value in vocabulary["coverage"].items())
    lines.append(
        f"draft vocabulary: {vocabulary['size']} of {vocabulary['of']} ids; covers {covered} supervised tokens"
    )
    lines += [f"source {name or '(not named)'}: {count} conversations" for name, count in card["sources"].items()]
    lines += [f"licence of {name}: {terms}" for name, terms in card["licences"].items()]
    return "\n".join([*lines, *card["stages"]]) + "\n"


def coverage(found: Sequence[Document], vocabulary: Int[Tensor, " Vd"], vocab: int) -> float:
    """The share of supervised tokens that the draft can say."""
    kept = torch.zeros(vocab, dtype=torch.bool)
    kept[vocabulary.cpu()] = True
    written = torch.cat([one.ids[one.supervised] for one in found]).long()
    return float(kept[written].double().mean())


def _part(found: Sequence[Document]) -> dict[str, Any]:
    talks = _conversations(found)
    lengths = torch.tensor([len(one) for one in found], dtype=torch.float64)
    return {
        "conversations": len(talks),
        "documents": len(found),
        "tokens": int(lengths.sum()),
        "supervised": sum(int(one.supervised.sum()) for one in found),
        "answers": sum(turn["role"] == "assistant" for one in talks for turn in one.messages),
        "document_tokens": {name: round(float(lengths.quantile(at))) for name, at in QUANTILES.items()},
        "cut": sum(one.cut for one in talks) / len(talks),
        "greedy": sum(one.temperature == 0 for one in talks) / len(talks),
    }


def _dropped_for_looping(data: ConversationData) -> dict[str, Any]:
    count = sum(report.dropped[LOOPING] for report in data.reports)  # they are dropped after they were read
    kept = len(_conversations(data.train)) + len(_conversations(data.held_out))
    return {"count": count, "share": count / (count + kept)}


def _conversations(found: Sequence[Document]) -> list[Conversation]:
    """Each conversation once: under a thinking template it may be several documents."""
    return list({id(one.conversation): one.conversation for one in found}.values())
