"""The adapter on tiny random models in float64: scored trees, compaction, ragged rows, taps, packed documents."""

from __future__ import annotations

import pytest
import torch

from eagle3_lab.errors import UserError
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import describe
from eagle3_lab.target_model.probe import probe
from eagle3_lab.types import PADDING, Batch, Needs, Tree, Verdict

TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}  # RMSNorm rounds through float32 even in a float64 model


def tiny(kind: str = "llama", **more: object) -> HFTarget:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
        bos_token_id=1,
        pad_token_id=1,
        **more,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # logits far enough apart for differences to show
    return HFTarget(model, None, describe(model, None, kind))


def tree_of(tokens: list[list[int]], parents: list[list[int]]) -> Tree:
    parent = torch.tensor(parents)
    return Tree(torch.tensor(tokens), parent, parent != PADDING)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_each_node_scores_as_its_path_alone_and_compaction_equals_a_fresh_prefill(kind: str) -> None:
    target = tiny(kind)
    prompts = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 0, 0]])
    lengths = torch.tensor([5, 3])
    session = target.open(2, 64, Needs((0, 2, 4), logits=True))
    session.prefill(prompts, lengths)
    tree = tree_of([[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]], [[0, 0, 0, 2, 3], [0, 0, 1, 1, PADDING]])
    out = session.score(tree)
    paths = [[0, 2, 3, 4], [0, 1, 3]]
    for row, path in enumerate(paths):
        ids = torch.cat((prompts[row, : lengths[row]], tree.tokens[row, path]))[None]
        plain = target.model(ids, output_hidden_states=True)
        torch.testing.assert_close(out.logits[row, path[-1]], plain.logits[0, -1], **TOLERANCE)
        for tap, layer in zip(out.taps, (0, 2, 4), strict=True):
            torch.testing.assert_close(tap[row, path[-1]], plain.hidden_states[layer][0, -1], **TOLERANCE)

    # Row 0 keeps the scattered nodes 0, 2, 3; row 1 its root alone.
    session.commit(
        Verdict(torch.tensor([[0, 2, 3], [0, PADDING, PADDING]]), torch.tensor([2, 0]), torch.tensor([1, 1]))
    )
    assert session.lengths.tolist() == [8, 4]
    for row, kept in enumerate(([0, 2, 3], [0])):
        committed = torch.cat((prompts[row, : lengths[row]], tree.tokens[row, kept]))[None]
        fresh = target.open(1, 64, Needs(logits=True))
        fresh.prefill(committed, torch.tensor([committed.shape[1]]))
        for layer in range(target.spec.layers):
            for ours, theirs in zip(session.cache.read(layer, 8), fresh.cache.read(layer, 8), strict=True):
                count = committed.shape[1]
                torch.testing.assert_close(ours[row, :, :count], theirs[0, :, :count], **TOLERANCE)


def test_a_row_whose_path_is_padding_keeps_nothing() -> None:
    target = tiny()
    session = target.open(2, 32, Needs(logits=True))
    session.prefill(torch.tensor([[5, 6], [7, 8]]), torch.tensor([2, 2]))
    session.score(tree_of([[1], [2]], [[0], [0]]))
    session.commit(Verdict(torch.tensor([[0], [PADDING]]), torch.tensor([0, 0]), torch.tensor([3, 3])))
    assert session.lengths.tolist() == [3, 2]


def test_packed_documents_give_the_features_of_each_alone() -> None:
    target = tiny()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 0]])
    document = torch.tensor([[0, 0, 0, 1, 1, 1, PADDING]])
    position = torch.tensor([[0, 1, 2, 0, 1, 2, 0]])
    batch = Batch(ids, torch.zeros_like(ids, dtype=torch.bool), position, document)
    out = target.features(batch, Needs((1, 4), top=True, logits=True))
    alone = target.model(ids[:, 3:6], output_hidden_states=True)
    torch.testing.assert_close(out.taps[0][:, 3:6], alone.hidden_states[1], **TOLERANCE)
    torch.testing.assert_close(out.taps[1][:, 3:6], alone.hidden_states[4], **TOLERANCE)
    torch.testing.assert_close(out.logits[:, 3:6], alone.logits, **TOLERANCE)
    assert bool(out.logits.isfinite().all())


def test_the_probe_passes_a_sound_target_and_stops_one_whose_head_it_does_not_know() -> None:
    target = tiny()
    assert probe(target) < 1e-6
    head = target.model.get_output_embeddings()
    real = head.forward
    plain = target.model.forward
    target.model.forward = lambda *a, **k: _scaled(plain(*a, **k))  # the model scales its logits behind our back
    with pytest.raises(UserError, match="cannot be decoded by trees"):
        probe(target)
    head.forward = real


def _scaled(out: object) -> object:
    out.logits = out.logits * 0.5
    return out


def test_what_cannot_be_right_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="rope type 'dynamic'"):
        tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UserError, match="cache layers .*LinearAttention"):
        tiny("qwen3_next")


def test_rotary_at_another_head_width_follows_the_same_rule() -> None:
    rotary = tiny().rotary(16)
    assert rotary.inv_freq.shape == (8,)
    torch.testing.assert_close(
        rotary.inv_freq.double(), 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8), atol=1e-6, rtol=1e-6
    )
