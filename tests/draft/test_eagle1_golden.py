"""The EAGLE head, trained as EAGLE and as HASS do, against tensors made by their public code, float32.

Made with SafeAILab/EAGLE cb7e084 (https://github.com/SafeAILab/EAGLE) and HArmonizedSS/HASS 38922e4
(https://github.com/HArmonizedSS/HASS). HASS lays its rows out by column: column i at step s is our row t = i - s, so
its columns i < s stand before the first anchor. The inputs mask them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.draft.attention.hass import MultiplicativeUnrolled
from eagle3_lab.draft.eagle1 import Eagle1
from eagle3_lab.draft.features import TopFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.interfaces import FrozenTarget
from eagle3_lab.rows import shift
from eagle3_lab.training.loss.terms import FeatureTerm, RowTerm, SmoothL1, SoftCE, TopKCE
from eagle3_lab.training.loss.unrolled import LossOut, UnrolledLoss
from eagle3_lab.types import PADDING, Batch, DraftOut

REAL = (12, 9)  # tokens of the two rows

MakeTarget = Callable[..., FrozenTarget]


def close(got: Tensor | dict[str, Tensor], told: Tensor | dict[str, Tensor]) -> None:
    torch.testing.assert_close(got, told, rtol=1e-5, atol=1e-5)


class Golden(NamedTuple):
    """The public head in our parts, and the public inputs."""

    draft: Eagle1
    target: FrozenTarget
    batch: Batch
    top: Tensor

    def second_row_alone(self) -> Golden:
        """Row 1 without its padding."""
        batch = Batch(*(x[1:, : REAL[1]] for x in vars(self.batch).values()))
        return self._replace(batch=batch, top=self.top[1:, : REAL[1]])

    def unrolled(self, unroll: Unroll) -> list[DraftOut]:
        return list(unroll(self.draft, TopFeature()((self.top,)), self.batch))

    def losses(self, terms: list[RowTerm | FeatureTerm], unroll: Unroll) -> LossOut:
        loss = UnrolledLoss(terms, step_decay=1.0, mask="official", edge="dropped")
        return loss(self.draft, self.unrolled(unroll), self.batch, self.target, self.top)

    def gradients(self, total: Tensor) -> dict[str, Tensor]:
        named = dict(self.draft.named_parameters())
        return dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))


@pytest.fixture
def make_golden(oracles: Path, make_target: MakeTarget) -> Callable[..., Golden]:
    def make(bias: bool = True) -> Golden:
        inputs = load_file(oracles / "eagle1" / "inputs.safetensors")
        weights = load_file(oracles / "eagle1" / "draft_weights.safetensors")
        target = make_target(inputs["embed_weight"], inputs["head_weight"], intermediate=56, heads=4, kv_heads=2)
        draft = Eagle1(bias=bias)
        draft.build(target, 48, torch.arange(320))
        if not bias:
            del weights["fc.bias"]
        missing, unexpected = draft.load_state_dict(weights, strict=False)
        assert (set(missing), unexpected) == ({"draft_vocab.d2t", "draft_vocab.t2d"}, [])
        padded = {
            name: torch.nn.utils.rnn.pad_sequence([inputs[f"raw{b}.{name}"] for b in range(2)], batch_first=True)
            for name in ("input_ids", "loss_mask", "hidden_state")
        }
        position = torch.arange(12).expand(2, 12)
        document = torch.where(position < torch.tensor(REAL)[:, None], 0, PADDING)
        batch = Batch(padded["input_ids"], padded["loss_mask"].bool(), position, document)
        return Golden(draft, target, batch, padded["hidden_state"])

    return make


def check_gradients(got: dict[str, Tensor], told: dict[str, Tensor], prefix: str = "") -> None:
    """Full gradients, or their short form: the norm, and row and column sums weighted by cosines."""
    names = set()
    for key, value in told.items():
        if key.startswith(f"{prefix}grad."):
            names.add(name := key.removeprefix(f"{prefix}grad."))
            close(got[name], value)
        elif key.startswith(f"{prefix}gradsum."):
            name, _, kind = key.removeprefix(f"{prefix}gradsum.").rpartition(".")
            names.add(name)
            wave = {d: torch.arange(got[name].shape[d]).float().cos() for d in (0, 1)}
            close({"norm": got[name].norm()[None], "row": got[name] @ wave[1], "col": wave[0] @ got[name]}[kind], value)
    assert names == set(got)


def by_column(outs: list[DraftOut]) -> Tensor:
    """Our rows in HASS's columns, [S, B, T, D]; columns before the first anchor are 0."""
    return torch.stack([shift(out.head_in.flip(1), s).flip(1) for s, out in enumerate(outs)])


def same_predictions(got: Tensor, told: Tensor, real: tuple[int, ...] = REAL) -> None:
    """At the real columns from the first anchor on."""
    for s in range(len(told)):
        for b, count in enumerate(real):
            close(got[s, b, s:count], told[s, b, s:count])


# ---- EAGLE


@pytest.mark.parametrize("bias", [True, False])
def test_eagles_features_logits_losses_and_gradients_are_the_public_ones(
    bias: bool, make_golden: Callable[..., Golden], oracles: Path
) -> None:
    told = load_file(oracles / "eagle1" / f"out_bias_{str(bias).lower()}.safetensors")
    golden, unroll = make_golden(bias), Unroll(depth=1)
    (out,) = golden.unrolled(unroll)
    same_predictions(out.head_in[None], told["predict"][None])
    for b, count in enumerate(REAL):
        close(golden.draft.logits(out.head_in[b, :count], 0), told["logits"][b, :count])
    close(golden.losses([SmoothL1()], unroll).steps, told["vloss"])
    close(golden.losses([SoftCE()], unroll).steps, told["ploss"])
    loss = golden.losses([SmoothL1(1.0), SoftCE(0.1)], unroll)
    close(loss.total, told["loss"][0])
    check_gradients(golden.gradients(loss.total), told)


# ---- HASS


MASKING = {"corrected": DenseUnrolled, "published": MultiplicativeUnrolled}


@pytest.mark.parametrize("masking", MASKING)
def test_hass_predictions_are_the_public_ones_in_our_rows(
    masking: str, make_golden: Callable[..., Golden], oracles: Path
) -> None:
    told = load_file(oracles / "hass" / f"out_{masking}.safetensors")
    golden, unroll = make_golden(), Unroll(3, detach=True, attention=MASKING[masking])
    outs = golden.unrolled(unroll)
    same_predictions(by_column(outs), told["predict"])
    logits = golden.draft.logits(by_column(outs)[2, 0, 2:], 2)
    close(logits, told["logits_step2_row0"][0, 2:] if masking == "corrected" else told["logits"][2, 0, 2:])
    alone = by_column(golden.second_row_alone().unrolled(unroll))
    same_predictions(alone, told["row1_alone.predict"], REAL[1:])


@pytest.mark.parametrize("masking", MASKING)
@pytest.mark.parametrize("weight", [0, 1])
def test_hass_losses_and_gradients_are_the_public_ones(
    masking: str, weight: int, make_golden: Callable[..., Golden], oracles: Path
) -> None:
    told = load_file(oracles / "hass" / f"out_{masking}.safetensors")
    golden, unroll = make_golden(), Unroll(3, detach=True, attention=MASKING[masking])
    for term, name in ((SmoothL1(), "vloss"), (SoftCE(), "ploss"), (TopKCE(k=10), "topk_loss")):
        close(golden.losses([term], unroll).steps, told[name])
    loss = golden.losses([SmoothL1(1.0), SoftCE(0.1), TopKCE(float(weight), k=10)], unroll)
    close(loss.steps, told[f"topkw{weight}.total"])
    # theirs is one backward a step, added up: one backward of the sum; the mean over steps is what they log
    close(loss.total / 3, told[f"topkw{weight}.logged_loss"][0])
    check_gradients(golden.gradients(loss.total), told, f"topkw{weight}.")


def test_hass_first_step_is_eagle(make_golden: Callable[..., Golden]) -> None:
    golden = make_golden()
    (eagle,) = golden.unrolled(Unroll(1))
    assert torch.equal(golden.unrolled(Unroll(3, detach=True))[0].head_in, eagle.head_in)


def test_published_masking_depends_on_the_padding_and_ours_does_not(make_golden: Callable[..., Golden]) -> None:
    def gaps(attention: Callable[[], DenseUnrolled]) -> list[float]:
        golden, unroll = make_golden(), Unroll(3, detach=True, attention=attention)
        padded, alone = golden.unrolled(unroll), golden.second_row_alone().unrolled(unroll)
        return [(p.head_in[1, :7] - a.head_in[0, :7]).abs().max().item() for p, a in zip(padded, alone, strict=True)]

    assert max(gaps(DenseUnrolled)) < 1e-5
    assert min(gaps(MultiplicativeUnrolled)) > 0.1


def test_only_the_columns_before_the_first_anchor_are_beyond_our_rows(make_golden: Callable[..., Golden]) -> None:
    golden = make_golden()
    batch = dataclasses.replace(golden.batch, supervised=golden.batch.document != PADDING)
    loss = UnrolledLoss([SoftCE()], mask="official")
    # every token supervised: HASS weighs columns 0..T-2 at each step, we the same ones but the first s
    assert loss.denominators(batch, 3).tolist() == [11 + 8 - 2 * s for s in range(3)]
