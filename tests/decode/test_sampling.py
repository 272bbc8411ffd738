"""The law: hand examples, then equality with transformers' own processors in float64."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle3_lab.decode.sampling import SamplingLaw, contexts
from eagle3_lab.types import Tree


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tree_of(tokens: list[int], parents: list[int]) -> Tree:
    parent = torch.tensor([parents])
    return Tree(torch.tensor([tokens]), parent, parent >= 0)


def test_a_nodes_context_is_the_committed_ids_and_its_own_path_without_padding() -> None:
    #  root 5 - node 1: 3 - node 3: 0
    #         - node 2: 4             node 4 is padding that carries 6
    tree = tree_of([5, 3, 4, 0, 6], [0, 0, 0, 1, -1])
    seen = contexts(torch.tensor([[1, 1, -1, -1]]), tree, 7)
    assert [torch.nonzero(row).flatten().tolist() for row in seen[0, :4]] == [
        [1, 5],
        [1, 3, 5],
        [1, 4, 5],
        [0, 1, 3, 5],
    ]


def test_temperature_zero_is_one_hot_at_the_lowest_arg_max_after_the_penalty() -> None:
    logits = torch.tensor([[[1.0, 4.0, 4.0, 2.0]]], dtype=torch.float64)
    root = tree_of([0], [0])
    empty = torch.tensor([[-1]])
    assert SamplingLaw().probs(logits, empty, root).tolist() == [[[0, 1, 0, 0]]]
    penalised = SamplingLaw(repetition_penalty=2.0).probs(logits, torch.tensor([[1]]), root)
    assert penalised.tolist() == [[[0, 0, 1, 0]]]


def test_a_token_that_stands_twice_in_the_context_is_penalised_once() -> None:
    logits = torch.tensor([[[8.0, -8.0, 0.0]]], dtype=torch.float64)
    p = SamplingLaw(1.0, repetition_penalty=2.0).probs(logits, torch.tensor([[0, 0, 1, 1]]), tree_of([0], [0]))
    torch.testing.assert_close(p[0, 0], torch.tensor([4.0, -16.0, 0.0], dtype=torch.float64).softmax(0))


OPTIONS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), values, strict=True))
    for values in itertools.product((0.3, 1.7), (None, 1, 5, 40), (None, 0.6, 1.0), (None, 0.2), (1.0, 1.3, 0.8))
]


def processors(options: dict[str, Any]) -> LogitsProcessorList:
    """transformers' own order, penalties first (``GenerationMixin._get_logits_processor``)."""
    built = LogitsProcessorList()
    if options["repetition_penalty"] != 1.0:
        built.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    built.append(TemperatureLogitsWarper(options["temperature"]))
    if options["top_k"] is not None:
        built.append(TopKLogitsWarper(options["top_k"]))
    if options["top_p"] is not None and options["top_p"] < 1:
        built.append(TopPLogitsWarper(options["top_p"]))
    if options["min_p"] is not None:
        built.append(MinPLogitsWarper(options["min_p"]))
    return built


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_equals_transformers_processors_on_every_path(options: dict[str, Any]) -> None:
    vocab = 30
    tokens = torch.randint(vocab, (2, 5), generator=seeded(1))
    parents = torch.tensor([[0, 0, 0, 1, 3], [0, 0, -1, 1, 0]])
    tree = Tree(tokens, parents, parents >= 0)
    logits = 3 * torch.randn(2, 5, vocab, generator=seeded(2), dtype=torch.float64)
    ids = torch.randint(vocab, (2, 6), generator=seeded(3))
    ids[0, 4:] = -1
    p = SamplingLaw(**options).probs(logits, ids, tree)
    assert p.dtype == torch.float64
    for b in range(2):
        for i in range(5):
            if parents[b, i] < 0:
                continue
            path = [i]
            while path[0]:
                path.insert(0, int(parents[b, path[0]]))
            context = torch.cat((ids[b][ids[b] >= 0], tokens[b, path]))[None]
            expected = processors(options)(
                cast(torch.LongTensor, context), cast(torch.FloatTensor, logits[b, i][None].clone())
            ).softmax(-1)[0]
            torch.testing.assert_close(p[b, i], expected, rtol=0, atol=1e-15)


def test_a_trees_law_is_the_law_of_each_node_alone() -> None:
    law = SamplingLaw(0.7, top_k=8, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
    tree = tree_of([4, 7, 2], [0, 0, 1])
    logits = torch.randn(1, 3, 20, generator=seeded(4))
    p = law.probs(logits, torch.tensor([[1, 2, -1]]), tree)
    alone = law.probs(logits[:, 2:], torch.tensor([[1, 2, 4, 7, -1]]), tree_of([2], [0]))
    assert torch.equal(p[:, 2:], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_logits_give_a_float32_law(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 1, 50, generator=seeded(5)).to(dtype)
    p = SamplingLaw(1.0).probs(logits, torch.tensor([[-1]]), tree_of([0], [0]))
    assert p.dtype == torch.float32
    torch.testing.assert_close(p, logits.float().softmax(-1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature must be finite and >= 0, got -0.1"),
        ({"temperature": 1e-38}, r"temperature must be 0 \(greedy\) or at least 1e-06, got 1e-38"),
        ({"temperature": float("nan")}, "temperature .* got nan"),
        ({"top_k": 0}, "top_k must be >= 1 .* got 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\] .* got 0.0"),
        ({"top_p": 1.1}, "top_p .* got 1.1"),
        ({"min_p": -0.5}, r"min_p must lie in \[0, 1\] .* got -0.5"),
        ({"min_p": 1.5}, "min_p .* got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and > 0 .* got 0.0"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_value_and_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingLaw(**options)
