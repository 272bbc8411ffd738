"""The EAGLE-3 head against tensors made by the public implementations, float32.

Made with SafeAILab/EAGLE cb7e084 (https://github.com/SafeAILab/EAGLE), sgl-project/SpecForge a6b6b02
(https://github.com/sgl-project/SpecForge) and speculators 0.9.0 (https://github.com/vllm-project/speculators).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_lab.draft.attention.dense import DenseUnrolled
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.draft.vocab import DraftVocab
from eagle3_lab.interfaces import Context, FrozenTarget
from eagle3_lab.rows import shift
from eagle3_lab.training.loss.terms import KL, HardCE, SoftCE, TotalVariation
from eagle3_lab.training.loss.unrolled import LossOut, UnrolledLoss
from eagle3_lab.types import PADDING, Batch, DraftOut, Rows


def close(got: Tensor | dict[str, Tensor], told: Tensor | dict[str, Tensor]) -> None:
    torch.testing.assert_close(got, told, rtol=1e-5, atol=1e-5)


class Golden(NamedTuple):
    """The public head in our parts, and the public inputs."""

    source: FusedFeature
    draft: Eagle3
    target: FrozenTarget
    batch: Batch
    taps: tuple[Tensor, ...]
    top: Tensor

    def row(self, b: int) -> Golden:
        """One sample alone."""
        one = slice(b, b + 1)
        batch = Batch(*(x[one] for x in vars(self.batch).values()))
        return self._replace(batch=batch, taps=tuple(tap[one] for tap in self.taps), top=self.top[one])

    def unrolled(self) -> list[DraftOut]:
        return list(Unroll(7)(self.draft, self.source(self.taps), self.batch))

    def loss(self, loss: UnrolledLoss) -> LossOut:
        return loss(self.draft, self.unrolled(), self.batch, self.target, self.top)

    def gradients(self, total: Tensor) -> dict[str, Tensor]:
        """By our names."""
        named = dict(self.source.named_parameters()) | dict(self.draft.named_parameters())
        return dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))


@pytest.fixture
def golden(oracles: Path, oracle_target: FrozenTarget) -> Golden:
    inputs = load_file(oracles / "inputs.safetensors")
    weights = load_file(oracles / "heads" / "official" / "model.safetensors")
    weights = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    vocab = DraftVocab.from_offsets(weights.pop("d2t"), oracle_target.spec.vocab, weights.pop("t2d"))

    source, draft = FusedFeature(), Eagle3(head="random", rope_base=10000.0)
    draft.build(oracle_target, source.build(oracle_target), vocab.ids())
    source.load_state_dict({"fc.weight": weights.pop("fc.weight")})
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) == {"draft_vocab.d2t", "draft_vocab.t2d"}

    real = inputs["attention_mask"].bool()
    batch = Batch(
        ids=inputs["input_ids"],
        supervised=inputs["loss_mask"].bool(),
        position=torch.arange(24).expand(2, 24),
        document=torch.where(real, 0, PADDING),
    )
    taps = inputs["hidden_states"].split(oracle_target.spec.hidden, dim=-1)
    close(oracle_target.logits(inputs["target_last_hidden"]), inputs["target_logits"])
    return Golden(source, draft, oracle_target, batch, taps, inputs["target_last_hidden"])


def published_gradients(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name.removeprefix("grad."): value for name, value in tensors.items() if name.startswith("grad.")}
    return {name.replace("midlayer.", "layers.0."): value for name, value in found.items()}


@pytest.mark.parametrize("made_by", ["official", "specforge"])
def test_prefill_gives_the_public_hidden_states_and_logits(golden: Golden, oracles: Path, made_by: str) -> None:
    told = load_file(oracles / f"{made_by}_infer.safetensors")
    hidden, logits = ("prefill_hidden", "prefill_logits") if made_by == "official" else ("hidden", "logits")
    one = golden.row(0)
    # the text's last row reads a token past the text, which is why the step is called without the unroll
    assert torch.equal(told["shifted_ids"][:, :-1], one.batch.ids[:, 1:])
    rows = Rows(one.batch.position, one.batch.document)
    out = one.draft.step(one.draft.start(one.source(one.taps)), told["shifted_ids"], rows, 0, DenseUnrolled())
    assert isinstance(out.carry, Tensor)
    close(out.carry, told[hidden])
    close(one.draft.logits(out.head_in[0], 0)[None], told[logits])


def test_a_cached_decoding_step_gives_the_official_hidden_state_and_logits(
    golden: Golden, oracles: Path, growing: Callable[[], Context]
) -> None:
    told = load_file(oracles / "official_infer.safetensors")
    one, context = golden.row(0), growing()
    rows = Rows(torch.arange(24)[None])
    first = one.draft.step(one.draft.start(one.source(one.taps)), told["shifted_ids"], rows, 0, context)
    assert isinstance(first.carry, Tensor)
    close(first.carry, told["prefill_hidden"])
    second = one.draft.step(first.carry[:, -1:], told["step2_ids"], Rows(torch.tensor([[24]])), 1, context)
    assert isinstance(second.carry, Tensor)
    close(second.carry, told["step2_hidden"])
    close(one.draft.logits(second.head_in[0], 1)[None], told["step2_logits"])


@pytest.mark.parametrize("made_by", ["official", "specforge"])
def test_seven_training_steps_give_the_public_losses_and_gradients(golden: Golden, oracles: Path, made_by: str) -> None:
    told = load_file(oracles / f"{made_by}_ttt.safetensors")
    loss = UnrolledLoss([SoftCE()], 0.8, mask="official", edge="counted", oov="drop", reduction="all")
    out = golden.loss(loss)
    close(out.steps, told["plosses"])
    close(out.total, told["total"][0])
    close(golden.gradients(out.total), published_gradients(told))
    # the public accuracy counts its own mask's rows, whose number shrinks with each step
    accuracy = (out.hit * out.weights).sum((0, 1)) / out.weights.sum((0, 1))
    close(accuracy, told["acces"])


def test_without_the_counted_edge_the_first_official_loss_is_another(golden: Golden) -> None:
    loss = UnrolledLoss([SoftCE()], 0.8, mask="official", edge="dropped", oov="drop", reduction="all")
    torch.testing.assert_close(golden.loss(loss).steps[0], torch.tensor(0.966), rtol=0, atol=1e-3)


def test_overlap_averages_to_specforges_acceptance_over_rows_inside_the_draft_vocabulary(
    golden: Golden, oracles: Path
) -> None:
    told = load_file(oracles / "specforge_ttt.safetensors")["acceptance"]
    out = golden.loss(UnrolledLoss([SoftCE()], 0.8, mask="official", edge="counted", reduction="all"))
    argmax = golden.target.logits(golden.top).argmax(-1)
    shifted = torch.stack([shift(argmax, 1 + s) for s in range(7)], dim=-1)
    kept = out.weights * golden.draft.draft_vocab.t2d[shifted]
    close((out.overlap * kept).sum((0, 1)) / kept.sum((0, 1)), told)


def test_seven_steps_give_speculators_logits(golden: Golden, oracles: Path) -> None:
    told = load_file(oracles / "speculators.safetensors")
    one = golden.row(0)
    for s, out in enumerate(one.unrolled()):
        # rows t < 23 - s: the last ones read tokens past the text, which the two fill differently
        logits = one.draft.logits(out.head_in[0, : 23 - s], s)
        close(logits, told[f"logits_step{s}"][0, : 23 - s])


def test_root_mask_and_renormalised_teacher_give_speculators_losses_and_gradients(
    golden: Golden, oracles: Path
) -> None:
    told = load_file(oracles / "speculators.safetensors")
    one, decay = golden.row(0), 0.8 ** torch.arange(7)
    # their "ce" is the cross-entropy with the teacher's arg-max
    out = one.loss(UnrolledLoss([HardCE()], 0.8, mask="root", oov="renormalise", reduction="supervised"))
    close(out.steps * decay, told["ce.step_losses_weighted"])
    close(out.total, told["ce.total"][0])
    out = one.loss(UnrolledLoss([TotalVariation()], 0.8, mask="root", oov="renormalise", reduction="supervised"))
    close(out.steps * decay, told["tv.step_losses_weighted"])
    out = one.loss(UnrolledLoss([KL()], 0.8, mask="root", oov="renormalise", reduction="supervised"))
    close(out.steps * decay, told["kl_div.step_losses_weighted"])
    close(out.total, told["kl_div.total"][0])
    close(one.gradients(out.total), published_gradients(told))


def test_the_public_vocabulary_is_what_the_inputs_say(golden: Golden, oracles: Path) -> None:
    inputs = load_file(oracles / "inputs.safetensors")
    assert torch.equal(golden.draft.draft_vocab.d2t, inputs["d2t"])
    assert torch.equal(golden.draft.draft_vocab.t2d, inputs["t2d"])
