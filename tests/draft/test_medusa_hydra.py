"""Medusa's and Hydra's heads: what each step reads, that they draft as they are trained, and the public numbers.

Made with FasterDecoding/Medusa 0bfdcd2 and e2a5d20 (https://github.com/FasterDecoding/Medusa) and zankner/Hydra 3f39fbd
(https://github.com/zankner/Hydra).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_lab.draft.hydra import Hydra
from eagle3_lab.draft.medusa import Medusa
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import Context, DraftModel, FrozenTarget
from eagle3_lab.training.loss.terms import RowTerm, SmoothL1, SoftCE, TokenCE
from eagle3_lab.training.loss.unrolled import LossOut, UnrolledLoss
from eagle3_lab.types import PADDING, Batch, DraftOut, Rows

DEPTH = 3


def close(got: Tensor | dict[str, Tensor], told: Tensor | dict[str, Tensor]) -> None:
    torch.testing.assert_close(got, told, rtol=1e-5, atol=1e-5)


# ---- by hand


@pytest.fixture
def features(make_lab: Callable[..., Any]) -> tuple[FrozenTarget, Tensor]:
    return make_lab().target, torch.randn(1, 7, 12, generator=torch.Generator().manual_seed(1)).double()


def built(draft: DraftModel, target: FrozenTarget) -> DraftModel:
    torch.manual_seed(0)
    draft.build(target, 12, torch.arange(0, 23, 2))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return draft.double()


def test_a_medusa_head_reads_its_rows_feature_and_no_token(
    features: tuple[FrozenTarget, Tensor], make_batch: Any
) -> None:
    target, feature = features
    draft = built(Medusa(heads=3, num_layers=2), target)
    one, other = make_batch([(7, 2)], length=7), make_batch([(7, 2)], length=7, seed=5)
    outs = list(Unroll(3)(draft, feature, one))
    assert not torch.equal(one.ids, other.ids)
    for s, again in enumerate(Unroll(3)(draft, feature, other)):
        assert torch.equal(outs[s].head_in, again.head_in)
        x = feature
        for block in draft.blocks[s]:
            y = x @ block.linear.weight.T + block.linear.bias
            x = x + y / (1 + torch.exp(-y))
        torch.testing.assert_close(outs[s].head_in, x)
        torch.testing.assert_close(draft.logits(x[0], s), x[0] @ draft.lm_heads[s].weight.T)
    assert draft.blocks[0][0] is not draft.blocks[0][1]


def test_a_hydra_head_reads_its_rows_feature_and_the_tokens_so_far(
    features: tuple[FrozenTarget, Tensor], make_batch: Any
) -> None:
    target, feature = features
    draft, batch = built(Hydra(heads=2), target), make_batch([(7, 2)], length=7)
    outs = list(Unroll(2)(draft, feature, batch))
    for s, out in enumerate(outs):
        token = [target.embed(batch.ids[0, 3 + i]) for i in range(s + 1)]
        z = torch.cat([feature[0, 2], *token])
        block = draft.mlps[s][0]
        y = block.linear(z)
        torch.testing.assert_close(out.head_in[0, 2], block.res_connection(z) + y / (1 + torch.exp(-y)))


def test_an_untrained_medusa_head_speaks_like_the_target_but_for_a_small_shift(
    features: tuple[FrozenTarget, Tensor], make_batch: Any
) -> None:
    target, feature = features
    draft = Medusa(heads=1)
    draft.build(target, 12, torch.arange(23))
    (out,) = Unroll(1)(draft.double(), feature, make_batch([(7, 2)], length=7))
    shift = torch.nn.functional.silu(draft.blocks[0][0].linear.bias)
    torch.testing.assert_close(draft.logits(out.head_in[0], 0), target.logits(feature[0] + shift))


@pytest.mark.parametrize("make", [Medusa, Hydra])
def test_a_frozen_head_is_one_copy_of_the_targets_rows_that_no_gradient_reaches(
    make: type[Medusa | Hydra], features: tuple[FrozenTarget, Tensor]
) -> None:
    draft = make(heads=3, head="frozen")
    draft.build(features[0], 12, torch.arange(0, 23, 2))
    assert len(draft.lm_heads) == 1
    assert torch.equal(draft.lm_heads[0].weight.double(), features[0].head_rows(draft.vocab).float().double())
    assert not any(p.requires_grad for p in draft.lm_heads.parameters())


@pytest.mark.parametrize("make", [Medusa, Hydra])
def test_wrong_sizes_are_refused(make: type[Medusa | Hydra]) -> None:
    for name in ("heads", "num_layers"):
        with pytest.raises(ValueError, match=f"draft.{name} must be >= 1, got 0"):
            make(**{name: 0})


# ---- drafting as trained


@pytest.mark.parametrize("prefix", [False, True])
def test_the_parallel_hydra_drafts_as_serial_decoding_does(
    prefix: bool, features: tuple[FrozenTarget, Tensor], make_batch: Any, growing: Callable[[], Context]
) -> None:
    target, feature = features
    draft, batch = built(Hydra(heads=3, prefix=prefix), target), make_batch([(7, 2)], length=7)
    parallel = list(Unroll(3)(draft, feature, batch))
    for anchor in range(3):
        context, carry, ids = growing(), draft.start(feature[:, : anchor + 1]), batch.ids[:, 1 : anchor + 2]
        for s in range(3):
            out = draft.step(carry, ids, Rows(torch.arange(anchor + 1)[None] + s), s, context)
            torch.testing.assert_close(out.head_in[:, -1], parallel[s].head_in[:, anchor])
            carry, ids = tuple(part[:, -1:] for part in out.carry), batch.ids[:, anchor + 2 + s, None]


# ---- public numbers


class Golden(NamedTuple):
    target: FrozenTarget
    batch: Batch
    states: Tensor

    def unrolled(self, draft: DraftModel) -> list[DraftOut]:
        return list(Unroll(DEPTH)(draft, self.states, self.batch))

    def loss(self, draft: DraftModel, *terms: RowTerm | SmoothL1) -> LossOut:
        loss = UnrolledLoss(terms, step_decay=1.0, mask="predicted")
        return loss(draft, self.unrolled(draft), self.batch, self.target, self.states)


@pytest.fixture
def golden(oracles: Path, make_target: Callable[..., FrozenTarget]) -> Golden:
    inputs = load_file(oracles / "medusa" / "inputs.safetensors")
    real = inputs["attention_mask"].bool()
    sizes = {"heads": 4, "kv_heads": 2, "intermediate": 40}
    target = make_target(inputs["embed_weight"], inputs["lm_head_weight"], **sizes)
    batch = Batch(
        ids=inputs["input_ids"],
        supervised=inputs["labels"] >= 0,
        position=torch.arange(14).expand(2, 14),
        document=torch.where(real, 0, PADDING),
    )
    return Golden(target, batch, inputs["base_hidden_states"])


def load(draft: DraftModel, golden: Golden, weights: dict[str, Tensor]) -> None:
    draft.build(golden.target, 24, torch.arange(72))
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"draft_vocab.d2t", "draft_vocab.t2d", "lm_heads.0.weight"}


def named(tensors: dict[str, Tensor], prefix: str, names: list[tuple[str, str]]) -> dict[str, Tensor]:
    """The tensors that begin with ``prefix``, by our names."""
    found = {}
    for name, value in tensors.items():
        if name.startswith(prefix):
            ours = name.removeprefix(prefix)
            for theirs, mine in names:
                ours = ours.replace(theirs, mine)
            found[ours] = value
    return found


def medusa_names(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """{i}.0.linear.x is our blocks.{i}.0.linear.x, {i}.1.weight our lm_heads.{i}.weight."""
    found = {}
    for name, value in named(tensors, prefix, []).items():
        head, _, rest = name.partition(".")
        found[f"lm_heads.{head}.weight" if rest == "1.weight" else f"blocks.{head}.{rest}"] = value
    return found


@pytest.mark.parametrize(("file", "head"), [("resblock_linear", "random"), ("shared_lm_head", "frozen")])
def test_medusa_gives_the_public_logits_losses_and_gradients(
    file: str, head: Any, golden: Golden, oracles: Path
) -> None:
    told = load_file(oracles / "medusa" / f"{file}.safetensors")
    draft = Medusa(heads=DEPTH, head=head)
    load(draft, golden, medusa_names(told, "head."))
    for s, out in enumerate(golden.unrolled(draft)):
        close(draft.logits(out.head_in.flatten(0, 1), s).view(2, 14, 72), told["logits"][s])
    out = golden.loss(draft, TokenCE())
    close(out.steps, told["head_losses"])
    close(out.total, told["loss"][0])
    trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    gradients = dict(zip(trained, torch.autograd.grad(out.total, list(trained.values())), strict=True))
    close(gradients, medusa_names(told, "grad.head."))  # what a shared head would get, they never save


HYDRA_NAMES = [
    ("hydra_mlp", "mlps"),
    ("hydra_lm_head", "lm_heads"),
    ("prefix_embeding_layer.layers.0", "prefix_layer.layer"),
    ("prefix_embeding_layer.norm", "prefix_layer.norm"),
]


def hydra_names(tensors: dict[str, Tensor], prefix: str, dropout: bool) -> dict[str, Tensor]:
    """By our names. ``dropout``: one stands before each first block and head, at number 0 of its sequence."""
    found = named(tensors, prefix, HYDRA_NAMES)
    if dropout:
        moved = [(r"^(mlps\.\d+)\.1\.", r"\1.0."), (r"^(lm_heads\.\d+)\.1\.", r"\1.")]
        for theirs, ours in moved:
            found = {re.sub(theirs, ours, name): value for name, value in found.items()}
    return found


def short_form(gradient: Tensor) -> dict[str, Tensor]:
    rows, columns = (torch.arange(n).float().cos() for n in gradient.shape)
    return {"norm": gradient.norm()[None], "row": gradient @ columns, "col": rows @ gradient}


@pytest.mark.parametrize(("file", "prefix"), [("mlp", False), ("prefix_mlp", True)])
def test_hydra_gives_the_public_states_logits_losses_and_gradients(
    file: str, prefix: bool, golden: Golden, oracles: Path
) -> None:
    told = load_file(oracles / "hydra" / f"{file}.safetensors")
    draft = Hydra(heads=DEPTH, prefix=prefix, head="random", rope_base=10000.0)
    load(draft, golden, hydra_names(told, "head.", prefix))
    real = golden.batch.document >= 0
    for s, out in enumerate(golden.unrolled(draft)):
        there = real & (torch.arange(14) < 13 - s)  # the last rows read tokens past the text
        close(out.head_in[there], told["hidden"][s][there])
        close(draft.logits(out.head_in[there], s), told["logits"][s][there])
    close(golden.loss(draft, TokenCE()).steps, told["head_lm_losses"])
    close(golden.loss(draft, SoftCE()).steps, told["head_teacher_losses"])
    mixed = golden.loss(draft, TokenCE(1.0), SoftCE(0.5))
    reconstruct = told["mix.total"][0] - (mixed.total + 0.2 * told["head_reconstruct_losses"].sum())
    assert reconstruct.abs() < 1e-4
    for law, term in (("lm", TokenCE()), ("teacher", SoftCE())):
        total = golden.loss(draft, term).total
        close(total, told[f"{law}.total"][0])
        parameters = dict(draft.named_parameters())
        gradients = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))
        full = hydra_names(told, f"{law}.grad.", prefix)
        assert full
        close({name: gradients[name] for name in full}, full)
        short = hydra_names(told, f"{law}.gradsum.", prefix)
        for name in {name.rsplit(".", 1)[0] for name in short}:
            form = short_form(gradients[name])
            close({part: form[part] for part in form}, {part: short[f"{name}.{part}"] for part in form})


def test_token_ce_is_of_the_token_that_the_text_goes_on_with(make_lab: Callable[..., Any], make_batch: Any) -> None:
    lab, batch = make_lab(vocab_size=23), make_batch([(8, 2)], length=10)
    with torch.no_grad():
        lab.draft.lm_head.weight.zero_()
    outs = lab.unrolled(batch, Unroll(1))
    out = UnrolledLoss([TokenCE()], mask="predicted")(lab.draft, outs, batch, lab.target, lab.taps(batch)[1])
    # every one of tokens 2 .. 7 is predicted, from rows 0 .. 5, by a uniform draft
    assert out.weights[0, :, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    torch.testing.assert_close(out.steps, torch.tensor([math.log(23)]).double())
