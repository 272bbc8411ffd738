"""A target's first blocks as a language model: whole it is the target, cut it trains alone, saved it is an ordinary
model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_targets import random_target
from tiny import VOCAB, write_target
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_lab.errors import UserError
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.types import PADDING, Batch, Needs, Tree

FAMILIES = ["llama", "qwen3", "gpt_neox", "granite", "gpt2"]  # untied, tied by two, scaled head, learned positions
IDS = torch.tensor([[5, 6, 7, 8, 9, 11, 12, 13, 14, 0]])
DOCUMENT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, PADDING]])
POSITION = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0]])
PACKED = Batch(IDS, DOCUMENT >= 0, POSITION, DOCUMENT)


def alone(ids: Tensor) -> Batch:
    document = torch.zeros_like(ids)
    return Batch(ids, document == 0, torch.arange(ids.shape[1])[None], document)


def tensors(target: HFTarget) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in target.model.state_dict().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.mark.parametrize("train_embedding", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_all_blocks_are_the_target_itself(kind: str, train_embedding: bool) -> None:
    target = random_target(kind)
    whole = target.first_layers(4, train_embedding=train_embedding).eval()
    expected = target.features(PACKED, Needs(top=True, logits=True))
    top = whole(PACKED)
    assert torch.equal(top, expected.top)
    assert torch.equal(whole.logits(top), expected.logits)


@pytest.mark.parametrize("kind", FAMILIES)
def test_cut_it_is_the_targets_own_early_state_behind_the_final_norm(kind: str) -> None:
    target = random_target(kind)
    body = target.model.base_model
    norm = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm"}.get(kind, "norm")
    (tap,) = target.features(PACKED, Needs(layers=(2,))).taps
    torch.testing.assert_close(target.first_layers(2).eval()(PACKED), body.get_submodule(norm)(tap))


def test_packed_documents_read_as_each_one_alone() -> None:
    lm = random_target().first_layers(3)
    packed = lm(PACKED)
    torch.testing.assert_close(packed[:, :5], lm(alone(IDS[:, :5])))
    torch.testing.assert_close(packed[:, 5:9], lm(alone(IDS[:, 5:9])))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("train_embedding", [False, True])
def test_every_parameter_gets_a_gradient_and_nothing_of_the_target_changes(train_embedding: bool, tied: bool) -> None:
    target = random_target(tie_word_embeddings=tied)
    before = tensors(target)
    lm = target.first_layers(2, train_embedding=train_embedding)
    parameters = dict(lm.named_parameters())
    tables = [name for name in parameters if "embed" in name or "head" in name]
    assert len(tables) == (0 if not train_embedding else 1 if tied else 2)
    assert len(parameters) == 2 * 9 + 1 + len(tables)  # nine tensors a block, and the norm
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
    lm.logits(lm(PACKED)).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters.values())
    optimizer.step()
    torch.testing.assert_close(tensors(target), before, atol=0, rtol=0)
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert (target.spec.layers, target.model.config.num_hidden_layers, len(target.blocks)) == (4, 4, 4)


def test_frozen_tables_are_the_targets_own_memory_and_no_part_of_the_state() -> None:
    target = random_target()
    lm = target.first_layers(2)
    ours, theirs = (m.get_input_embeddings().weight for m in (lm.model, target.model))
    assert ours.data_ptr() == theirs.data_ptr()
    assert not [name for name in lm.state_dict() if "embed" in name or "head" in name]
    assert lm.to(torch.float32).model.get_input_embeddings().weight.dtype == torch.float32
    assert target.dtype == torch.float64


def test_a_target_in_a_narrow_dtype_gives_parameters_in_float32() -> None:
    target = random_target(dtype=torch.bfloat16)
    lm = target.first_layers(2)
    top = lm(PACKED)
    assert {p.dtype for p in lm.parameters()} == {top.dtype, lm.logits(top).dtype} == {torch.float32}
    assert target.dtype == torch.bfloat16


def test_it_decodes_with_the_weights_it_has_at_the_time() -> None:
    lm = random_target().first_layers(2)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.05)
    session = lm.open(1, 32, Needs(logits=True))
    session.prefill(IDS[:, :4], torch.tensor([4]))
    tree = Tree(IDS[:, 4:7], torch.tensor([[0, 0, 1]]), torch.ones(1, 3, dtype=torch.bool))
    expected = lm.logits(lm(alone(IDS[:, :7])))[:, 4:]
    torch.testing.assert_close(session.score(tree).logits, expected, atol=2e-5, rtol=1e-5)
    assert all(p.requires_grad for p in lm.parameters())


@pytest.mark.parametrize("count", [0, -1, 5])
def test_more_or_fewer_blocks_than_there_are_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"layers must be within 1\.\.4, the target's, got {count}"):
        random_target().first_layers(count)


def test_a_per_layer_list_of_the_configuration_is_cut_too() -> None:
    lm = random_target("qwen3").first_layers(3)
    assert lm.model.config.num_hidden_layers == len(lm.model.config.layer_types) == 3


@pytest.mark.parametrize("train_embedding", [False, True])
def test_saved_it_is_an_ordinary_model_that_says_the_same(folder: Path, train_embedding: bool, tmp_path: Path) -> None:
    target = TargetChoice(str(folder)).load()
    lm = target.first_layers(2, train_embedding=train_embedding)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1.1)
    lm.save(tmp_path / "draft")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, lm.logits(lm(alone(IDS))))
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").get_vocab() == target.tokenizer.get_vocab()
    loaded = TargetChoice(str(tmp_path / "draft")).load()  # probed
    assert (loaded.spec.layers, loaded.spec.vocab) == (2, VOCAB)
    assert loaded.spec.vocabulary_hash == target.spec.vocabulary_hash
    with pytest.raises(UserError, match="draft: is there already; name a new folder"):
        lm.save(tmp_path / "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("train_embedding", [False, True])
def test_a_tied_model_is_saved_tied(train_embedding: bool, folder: Path, tmp_path: Path) -> None:
    tied = random_target(tie_word_embeddings=True, dtype=torch.float32)
    tokenizer = TargetChoice(str(folder)).tokenizer()
    lm = HFTarget(tied.model, tokenizer, tied.spec).first_layers(2, train_embedding=train_embedding)
    lm.save(tmp_path / "draft")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, lm.logits(lm(alone(IDS))))
