"""Answers made side by side: each is what the target alone would say, however many rows there are."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
import torch
from random_targets import random_target
from torch import Tensor

from eagle3_lab.data.generation import batched
from eagle3_lab.data.generation.batched import SETTLE_EVERY, Answer, answers, together
from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.errors import UserError
from eagle3_lab.kv_cache import BUCKET
from eagle3_lab.seeds import answer_seed
from eagle3_lab.target_model.hf_target import HFSession, HFTarget
from eagle3_lab.types import Needs

LIMIT = 2 * SETTLE_EVERY + 4


@cache
def llama() -> HFTarget:
    return random_target()


def ending(target: HFTarget, ends: Sequence[int]) -> HFTarget:
    """The same target with other end tokens."""
    return HFTarget(target.model, None, dataclasses.replace(target.spec, end_tokens=tuple(ends)))


def prompts(lengths: Sequence[int], vocab: int = 97, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=draw).tolist() for n in lengths]


PROMPTS = prompts((9, 3, 17, 1, 6, 30, 2, 11))


def alone(target: HFTarget, prompt: list[int], limit: int = LIMIT) -> tuple[int, ...]:
    """Vanilla decoding of one prompt by the decoder."""
    return _alone(target.spec.end_tokens, tuple(prompt), limit)


@cache
def _alone(ends: tuple[int, ...], prompt: tuple[int, ...], limit: int) -> tuple[int, ...]:
    target = ending(llama(), ends)
    (decoded,) = decode(
        target.open(1, len(prompt) + limit + 2, Needs(logits=True)),
        Vanilla(),
        SamplingLaw(),
        ExactVerifier(),
        torch.tensor([prompt]),
        torch.tensor([len(prompt)]),
        max_new_tokens=limit,
        end_tokens=ends,
        context_limit=target.spec.max_positions,
        generators=[torch.Generator()],
    )
    return decoded.tokens


@cache
def endless() -> list[tuple[int, ...]]:
    """What the target says to each prompt when nothing ends it."""
    return [alone(ending(llama(), ()), prompt) for prompt in PROMPTS]


@cache
def ends() -> tuple[int, ...]:
    """Some end tokens that answers end with at once, early and late."""
    said = endless()
    return said[0][7], said[1][0], said[4][20]


def made(target: HFTarget, asked: list[list[int]] = PROMPTS, **options: object) -> list[Answer]:
    """All answers, in the order of the prompts."""
    options = {"temperature": 0.0, "max_new_tokens": LIMIT} | options
    found = sorted(answers(target, asked, **options), key=lambda answer: answer.index)
    assert [answer.index for answer in found] == list(range(len(asked)))
    return found


# ----------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_greedy_answers_are_vanilla_decoding_whatever_the_rows(rows: int) -> None:
    """With 3 rows each is refilled several times, by longer prompts, after answers of any length."""
    target = ending(llama(), ends())
    found = made(target, rows=rows)
    assert [answer.tokens for answer in found] == [alone(target, prompt) for prompt in PROMPTS]
    lengths = [len(answer.tokens) for answer in found]
    assert min(lengths) == 1 and max(lengths) == LIMIT and len(set(lengths)) > 3


def test_an_answer_ends_with_the_first_end_token_or_is_cut_at_the_limit() -> None:
    found = made(ending(llama(), ends()), rows=4)
    for answer, said in zip(found, endless(), strict=True):
        first = min((said.index(end) for end in ends() if end in said), default=None)
        assert answer.cut == (first is None)
        assert answer.tokens == (said if first is None else said[: first + 1])
    assert {answer.cut for answer in found} == {False, True}


def test_an_end_token_in_the_last_place_is_an_end_and_no_cut() -> None:
    said = endless()[4]
    end = said[20]
    place = said.index(end)
    for limit, cut in ((place, True), (place + 1, False)):
        (answer,) = made(ending(llama(), [end]), [PROMPTS[4]], max_new_tokens=limit)
        assert answer == Answer(0, said[: place + 1][:limit], cut)


def test_one_row_outlives_many_idle_ones_in_a_cache_without_a_slot_to_spare() -> None:
    """The longest prompt ends at once, its row idles at the far end of the cache; another runs to the limit."""
    said = {tuple(p): t for p, t in zip(PROMPTS, endless(), strict=True)}
    end = said[tuple(PROMPTS[5])][0]
    survivors = [p for p in PROMPTS if end not in said[tuple(p)]]
    asked = [PROMPTS[5], survivors[0], *(p for p in PROMPTS if end in said[tuple(p)][:5])]
    target = ending(llama(), [end])
    limit = BUCKET - len(PROMPTS[5]) - 1
    found = made(target, asked, rows=len(asked), max_new_tokens=limit)
    assert [a.tokens for a in found] == [alone(target, p, limit) for p in asked]
    assert len(found[0].tokens) == 1 and len(found[1].tokens) == limit


def test_all_rows_may_run_to_the_very_end_of_the_cache() -> None:
    """Equal prompts that are never ended fill every row to its last slot; the next ones take their place."""
    length = 70
    limit = BUCKET - length - 1
    asked = prompts([length] * 5, seed=3)
    target = ending(llama(), [])
    found = made(target, asked, rows=2, max_new_tokens=limit)
    assert all(answer.cut and len(answer.tokens) == limit for answer in found)
    assert found[4].tokens == alone(target, asked[4], limit)


def test_no_prompts_no_answers() -> None:
    assert made(llama(), []) == []


# ------------------------------------------------------------------------------------------------------- going on


class Watch:
    """What the rows' draws were made from, by generator, the shapes of the forwards that gave it, and how many of those
    there were."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.logits: dict[int, list[Tensor]] = {}
        self.shapes: dict[int, list[tuple[int, ...]]] = {}
        self.forwards, self.shape = 0, ()
        self._draw = batched.draw
        self._score = HFSession._run
        patch.setattr(batched, "draw", self.draw)
        patch.setattr(HFSession, "_run", lambda session, *words: self.run(session, *words))

    def draw(self, logits: Tensor, temperature: float, generators: Sequence[Any], top_p: float | None) -> Tensor:
        for row, generator in zip(logits, generators, strict=True):
            if generator is not None:
                self.logits.setdefault(generator.initial_seed(), []).append(row.clone())
                self.shapes.setdefault(generator.initial_seed(), []).append(self.shape)
        return self._draw(logits, temperature, generators, top_p)

    def run(self, session: HFSession, ids: Tensor, *words: Any) -> object:
        self.forwards += 1
        self.shape = (*ids.shape, session.cache.view(ids.shape[1]))
        return self._score(session, ids, *words)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 3), (torch.bfloat16, 5)])
def test_what_is_known_is_not_answered_and_changes_no_bit_of_any_other_answer(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends after any number of answers and is made again with those: the logits that the others are drawn
    from are the same, of forwards of the same shapes, and those that only the known ones would need are left out."""
    plain = random_target(dtype=dtype)
    target = ending(plain, range(0, 97, 7))
    options = {"temperature": 1.0, "max_new_tokens": 3 * SETTLE_EVERY, "rows": rows, "seed": 3}
    asked = PROMPTS + prompts((40, 5, 8, 21, 13), seed=1)
    watch = Watch(monkeypatch)
    order = list(answers(target, asked, **options))
    whole, shapes, straight = watch.logits, watch.shapes, watch.forwards
    assert len({len(answer.tokens) for answer in order}) > 5
    saved = 0
    for count in range(len(order) + 1):
        watch.logits, watch.shapes, watch.forwards = {}, {}, 0
        known = {answer.index: len(answer.tokens) for answer in order[:count]}
        assert list(answers(target, asked, known=known, **options)) == order[count:]
        left = {answer_seed(3, 0, answer.index) for answer in order[count:]}
        assert set(watch.logits) == left
        for seed in left:
            assert watch.shapes[seed] == shapes[seed]
            assert torch.equal(torch.stack(watch.logits[seed]), torch.stack(whole[seed])), count
        assert watch.forwards <= straight
        saved += straight - watch.forwards
    assert watch.forwards == 0 and saved > straight


def test_forwards_that_only_known_answers_need_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: of three known answers and one that is not, only this one's prefill and steps are run."""
    asked = prompts((3, 4, 5, 6))
    order = list(answers(ending(llama(), []), asked, temperature=1.0, max_new_tokens=7, rows=1))
    watch = Watch(monkeypatch)
    known = {answer.index: 7 for answer in order[:3]}
    assert (
        list(answers(ending(llama(), []), asked, temperature=1.0, max_new_tokens=7, rows=1, known=known)) == order[3:]
    )
    assert watch.forwards == 7


def test_prompts_are_read_together_so_that_tokens_and_forwards_are_fewest() -> None:
    """By trying every split."""
    draw = random.Random(0)
    for _ in range(60):
        lengths = sorted(draw.choices(range(1, 60), k=draw.randint(1, 9)))
        forward = draw.choice((0, 3, 16, 500))

        def cost(sizes: Sequence[int], lengths: list[int] = lengths, forward: int = forward) -> int:
            ends = list(accumulate(sizes))
            return sum(size * lengths[end - 1] + forward for size, end in zip(sizes, ends, strict=True))

        splits = [
            [b - a for a, b in pairwise((0, *cuts, len(lengths)))]
            for n in range(len(lengths))
            for cuts in combinations(range(1, len(lengths)), n)
        ]
        found = together(lengths, forward)
        assert sum(found) == len(lengths) and cost(found) == min(map(cost, splits))
    assert together([10, 12, 90], 16) == [2, 1] and together([], 16) == []


# ---------------------------------------------------------------------------------------------------------- sampled


def test_draws_depend_on_seed_and_prompt_alone() -> None:
    def drawn(rows: int, seed: int = 5) -> list[Answer]:
        return made(llama(), temperature=1.0, rows=rows, seed=seed, max_new_tokens=SETTLE_EVERY + 2)

    one = drawn(rows=1)
    assert drawn(rows=3) == one
    assert drawn(rows=3) == one
    assert drawn(rows=32) == one
    assert drawn(rows=3, seed=6) != one


def test_equal_prompts_draw_apart() -> None:
    same = made(llama(), [PROMPTS[0]] * 6, temperature=1.0, max_new_tokens=12)
    assert len({answer.tokens for answer in same}) == 6


def test_numbers_stand_for_indices_where_a_call_has_a_part_of_all_prompts() -> None:
    whole = made(llama(), temperature=1.0, rows=3, max_new_tokens=6)
    part = [4, 1, 6]
    asked = [PROMPTS[i] for i in part]
    some = answers(llama(), asked, temperature=1.0, rows=2, max_new_tokens=6, numbers=part)
    found = {answer.index: answer.tokens for answer in some}
    assert [found[i] for i in range(3)] == [whole[i].tokens for i in part]


@pytest.mark.parametrize("temperature", [0.4, 4.0])
def test_two_tokens_follow_the_tempered_law(temperature: float) -> None:
    """Joint law of an answer's first two tokens, the first drawn at prefill, the second in a round; 4 tokens."""
    draws, prompt = 300, [3, 1, 2]
    target = ending(random_target(vocab_size=4, num_hidden_layers=1, seed=2), [])
    found = Counter(
        a.tokens for a in made(target, [prompt] * draws, temperature=temperature, max_new_tokens=2, rows=50)
    )
    assert misfit(found, joint_law(target, prompt, temperature)) < 4
    assert misfit(found, joint_law(target, prompt, 1.0)) > 10, "another temperature's law must not fit"


def joint_law(target: HFTarget, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    def law(ids: list[int]) -> list[float]:
        logits = target.model(torch.tensor([ids])).logits[0, -1].detach()
        return torch.softmax(logits / temperature, -1).tolist()

    return {(a, b): p * q for a, p in enumerate(law(prompt)) for b, q in enumerate(law([*prompt, a]))}


def misfit(found: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square over the cells of at least 5 expected draws, the others taken together: how many standard deviations
    it lies above its mean."""
    draws = sum(found.values())
    common = [pair for pair, p in law.items() if p * draws >= 5]
    cells = [(found[pair], law[pair] * draws) for pair in common]
    cells.append((draws - sum(seen for seen, _ in cells), draws - sum(mean for _, mean in cells)))
    chi = sum((seen - mean) ** 2 / mean for seen, mean in cells if mean > 1e-6)
    degrees = len(cells) - 1
    assert degrees >= 4
    return (chi - degrees) / math.sqrt(2 * degrees)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_nan_are_an_error_of_one_line(temperature: float) -> None:
    target = random_target()
    target.model.get_output_embeddings().weight[3, 0] = torch.nan
    with pytest.raises(
        UserError, match=r"logits are NaN at prompt 0; if its dtype is float16, use bfloat16 or float32"
    ):
        made(target, [[5, 6]], temperature=temperature)
