"""Random streams: no two draws of one evaluation share numbers, and what was drawn before is drawn again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_target

from eagle3_lab import seeds
from eagle3_lab.data.tasks import Task
from eagle3_lab.decode.methods import PromptLookup, Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.evaluation.runner import Contestant, Evaluation, _Player, measure
from eagle3_lab.pipeline.chat_session import ChatSession
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice

LETTERS, TOKENS, PROMPTS = "abcdefgh", 20, 8


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> HFTarget:
    """A target of the same distribution everywhere: each of eight letters with probability 1/8."""
    target = TargetChoice(str(write_target(tmp_path_factory.mktemp("flat") / "target"))).load()
    weight = target.model.get_output_embeddings().weight
    with torch.no_grad():
        weight.zero_()
        weight[:, 0] = -1e4  # dimension 0 of what it reads is positive everywhere
        weight[target.tokenizer(LETTERS, add_special_tokens=False)["input_ids"], 0] = 0.0
    return target


def task(folder: Path, name: str = "mine") -> Task:
    path = folder / f"{name}.jsonl"
    path.write_text('{"turns": ["ab", "cd"]}\n' * PROMPTS)
    return Task(name, str(path))


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def test_the_turns_of_a_prompt_agree_no_more_than_by_chance(flat: HFTarget, tmp_path: Path) -> None:
    evaluation = Evaluation([task(tmp_path)], {}, max_new_tokens=TOKENS, laws={"T1": SamplingLaw(1.0)})
    turns = measure([Contestant("vanilla", Vanilla(), flat)], evaluation, None)["vanilla"]
    first, second = ([t for turn in turns if turn.number == n for t in turn.decoded.tokens] for n in (0, 1))
    assert len(first) == PROMPTS * TOKENS and set(first) == set(second) and len(set(first)) == len(LETTERS)
    assert agreement(first, second) < 1 / 8 + 4 * (7 / 64 / len(first)) ** 0.5  # four standard deviations
    assert len({turn.decoded.tokens for turn in turns}) == len(turns), "the same question each time"


def test_no_two_draws_of_an_evaluation_start_from_one_seed_but_those_of_methods_on_one_turn(
    flat: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laws: dict[str, Law] = {"T1": SamplingLaw(1.0), "again": SamplingLaw(1.0), "cool": SamplingLaw(0.5)}
    methods: dict[str, Method] = {"pld": PromptLookup(length=2, full=False)}
    contestants = [Contestant("vanilla", Vanilla(), flat), Contestant("pld", methods["pld"], flat)]
    drawn: dict[str, list[int]] = {}
    whole = _Player._decode

    def decode(player: _Player, law: Any, ids: Any, limit: int, seed: int) -> Any:
        drawn.setdefault(player.name, []).append(seed)
        return whole(player, law, ids, limit, seed)

    monkeypatch.setattr(_Player, "_decode", decode)
    for seed in (0, 1):  # a repeat
        monkeypatch.setattr(_Player, "warm_up", lambda *_: None)
        evaluation = Evaluation([task(tmp_path), task(tmp_path, "yours")], methods, 2, laws, seed=seed)
        measure(contestants, evaluation, None)
    assert drawn["vanilla"] == drawn["pld"] and len(drawn["pld"]) == len(laws) * 2 * PROMPTS * 2 * 2
    numbers = {torch.rand(4, generator=seeds.generator(seed)).numpy().tobytes() for seed in drawn["pld"]}
    assert len(numbers) == len(drawn["pld"])


def test_the_answers_of_a_chat_agree_no_more_than_by_chance(flat: HFTarget) -> None:
    def said() -> list[tuple[int, ...]]:
        proposer = Vanilla().proposer(flat.spec, None)
        session = ChatSession(
            flat, proposer, SamplingLaw(1.0), ExactVerifier(), name="vanilla", max_new_tokens=TOKENS, seed=3
        )
        return [session.answer(text).tokens for text in ("ab", "cd")]

    first, second = said()
    assert agreement(first, second) < 0.5
    assert said() == [first, second]


def test_different_tuples_are_different_streams() -> None:
    words = [(1,), ("1",), (1, 2), (12,), ("1 2",), ("1", "2"), (1, "2"), ('1" "2',), (2, 1)]
    assert len({seeds.stream(*tuple_) for tuple_ in words}) == len(words)
    several = [
        *(seeds.evaluation_seed(s, law, "t", p, n) for s in (0, 1) for law in "ab" for p in range(20) for n in (0, 1)),
        *(seeds.bench_seed(s, part, p) for s in (0, 1) for part in ("measured", "calibration") for p in range(20)),
        *(seeds.chat_seed(s, n) for s in (0, 1) for n in range(20)),
        *(seeds.order_seed(s, n) for s in (0, 1) for n in range(20)),
        *(seeds.noise_seed(s, n, b, r) for s in (0, 1) for n in range(4) for b in (0, 1) for r in (0, 1)),
        *(seeds.bootstrap_seed(s, name) for s in (0, 1) for name in ("hits", "evaluation")),
    ]
    assert len(set(several)) == len(several) and all(0 <= seed < 2**32 for seed in several)


def test_seeds_of_neighbouring_answers_differ_in_every_half() -> None:
    found = [seeds.answer_seed(seed, 0, number) for seed in range(40) for number in range(40)]
    assert len(set(found)) == len({s & 0xFFFFFFFF for s in found}) == 1600  # torch's generator takes the low half
    assert all(0 <= s < 2**63 for s in found)
    assert 0.45 < sum(s & 1 for s in found) / 1600 < 0.55


def test_trained_weights_and_prepared_answers_are_drawn_as_they_always_were() -> None:
    def low(text: str) -> int:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    assert seeds.order_seed(3, 5) == low("3 5")
    assert seeds.noise_seed(1, 20, 3, 0) == low("1 20 3 0")
    assert seeds.answer_seed(0, 0, 0) == 3119036373970289394
    assert seeds.answer_seed(3, 2, 7) == 588615847740940901
    assert seeds.written_seed(5, 7) == seeds.answer_seed(3, 2, 7)
    assert seeds.packaged_seed(2, 3) == 1005
