"""Every causal LM family of transformers, loaded as a user loads it: served exactly, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import CONTEXT, FAMILIES, NOT_BUILT, Family, write_family
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.errors import UserError
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.types import PADDING, Batch, Needs, Tree

QUICK = (
    "gpt2",
    "gptj",
    "gpt_bigcode",
    "codegen",
    "falcon",
    "mixtral",
    "gemma3",
    "gemma3n_text",
    "bert",
    "jamba",
    "doge",
)
NEW = 6


def families() -> list:
    """Those that this version of transformers has; all but a few are slow in sum."""
    return [
        pytest.param(name, family, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, family in FAMILIES.items()
        if name in KNOWN
    ]


@pytest.mark.parametrize(("name", "family"), families())
def test_a_family_is_served_exactly_or_refused_in_one_line(tmp_path: Path, name: str, family: Family) -> None:
    folder = write_family(tmp_path / "target", name, family)
    choice = TargetChoice(str(folder), attention="eager" if family.attention == "eager" else "sdpa", device="cpu")
    if family.refusal is not None:
        with pytest.raises(UserError, match=family.refusal) as refused:
            choice.load()
        assert "\n" not in str(refused.value)
        return
    target = choice.load()
    assert target.spec.max_positions == CONTEXT
    taps_and_logits_are_the_plain_forwards(target)
    a_tree_scores_as_its_paths_alone(target)
    greedy_answers_are_plain_ones_to_the_last_position(target)


def test_every_family_that_transformers_knows_has_a_verdict() -> None:
    """A family of a later transformers than these lists is loaded like any other: the probe decides."""
    listed = set(FAMILIES) | {name for names in NOT_BUILT.values() for name in names.split()}
    gone = {name for name in listed if name not in KNOWN}
    assert len(gone) < len(listed) / 2
    assert not set(FAMILIES) & {name for names in NOT_BUILT.values() for name in names.split()}


def draw(rows: int, length: int) -> Tensor:
    return torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(length))


def close(ours: Tensor, plain: Tensor) -> None:
    """Equal to a thousandth of the largest value: float32, and experts' products in another order."""
    assert float((ours - plain).abs().max()) <= 1e-3 * float(plain.abs().max())


@torch.no_grad()
def taps_and_logits_are_the_plain_forwards(target: HFTarget) -> None:
    """Two documents packed in one row, the states of every layer among them."""
    lengths = [12, 9]
    documents, layers = [draw(1, length) for length in lengths], target.spec.layers
    ids = torch.cat(documents, dim=1)
    number = torch.cat([torch.full_like(one, i) for i, one in enumerate(documents)], dim=1)
    position = torch.cat([torch.arange(length)[None] for length in lengths], dim=1)
    batch = Batch(ids, torch.zeros_like(ids, dtype=torch.bool), position, number)
    out = target.features(batch, Needs(tuple(range(layers + 1)), top=True, logits=True))
    begin = 0
    for one in documents:
        place = slice(begin, begin + one.shape[1])
        plain = target.model(one, output_hidden_states=True)
        close(out.logits[:, place], plain.logits)
        for layer in range(layers + 1):
            close(out.taps[layer][:, place], plain.hidden_states[layer])
        assert torch.equal(out.top, out.taps[layers])
        begin = place.stop


@torch.no_grad()
def a_tree_scores_as_its_paths_alone(target: HFTarget) -> None:
    """Two rows of different lengths, and a tree with padding."""
    session = target.open(2, CONTEXT, Needs(logits=True))
    prompts, lengths = draw(2, 11), [11, 7]
    session.prefill(prompts, torch.tensor(lengths))
    parents = torch.tensor([[0, 0, 0, 2, 3], [0, 0, 1, 1, PADDING]])
    tree = Tree(draw(2, 5), parents, parents != PADDING)
    scored = session.score(tree).logits
    for row, paths in enumerate(([[0, 1], [0, 2, 3, 4]], [[0, 1, 2], [0, 1, 3]])):
        for path in paths:
            ids = torch.cat((prompts[row, : lengths[row]], tree.tokens[row, path]))[None]
            close(scored[row, path[-1]], target.model(ids).logits[0, -1])


@torch.no_grad()
def greedy_answers_are_plain_ones_to_the_last_position(target: HFTarget) -> None:
    """A row that fills the context and one that does not, against the arg-max of the model itself."""
    lengths = [CONTEXT - 4, 5]
    prompts = draw(2, lengths[0])
    decoded = decode(
        target.open(2, CONTEXT + NEW + 2, Needs(logits=True)),
        Vanilla(),
        SamplingLaw(),
        ExactVerifier(),
        prompts,
        torch.tensor(lengths),
        max_new_tokens=NEW,
        end_tokens=(),
        context_limit=target.spec.max_positions,
        generators=[torch.Generator(), torch.Generator()],
    )
    assert [(len(one.tokens), one.ended) for one in decoded] == [(4, "context"), (NEW, "length")]
    for row, one in enumerate(decoded):
        ids = prompts[row : row + 1, : lengths[row]]
        for token in one.tokens:
            plain = target.model(ids).logits[0, -1]
            assert plain[token] >= plain.max() - 1e-3 * plain.abs().max()
            ids = torch.cat((ids, torch.tensor([[token]])), dim=1)
