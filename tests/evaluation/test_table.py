"""The closing table: measured from decoded answers, shown three ways."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from several import several

from eagle3_lab.evaluation.bootstrap import Interval
from eagle3_lab.evaluation.results import Answered, ClosingTable, MethodResult, OnePass, method_result
from eagle3_lab.evaluation.table import as_json, as_markdown, as_text
from eagle3_lab.types import Decoded, Round


def answer(accepted: list[int], depth: int, verify_s: float, draft_s: float = 0.0) -> Answered:
    """A prompt of one turn, whose rounds accept so many drafts, nothing trimmed."""
    rounds = tuple(Round(min(a + 1, depth), a, a + 1) for a in accepted)
    length = 1 + sum(r.emitted for r in rounds)
    seconds = {"prefill": 1.0, "draft": draft_s, "verify": verify_s, "host": 0.0}
    return Answered((Decoded(tuple(range(length)), rounds, "end", seconds),), sum(seconds.values()))


def measured() -> ClosingTable:
    def result(name: str, dtype: str, answered: list[Answered], depth: int, lossless: bool = True) -> MethodResult:
        seed, same_dtype = torch.Generator().manual_seed(0), vanilla if dtype == "float32" else fastest
        return method_result(name, dtype, answered, same_dtype, fastest, depth, seed, lossless)

    vanilla = [answer([0] * 10, 0, verify_s=10.0), answer([0] * 4, 0, verify_s=4.0)]
    fastest = [answer([0] * 10, 0, verify_s=4.5), answer([0] * 4, 0, verify_s=1.5)]
    chain = [answer([0, 2, 3, 1], 3, verify_s=3.0, draft_s=1.0), answer([1, 1], 3, verify_s=1.5, draft_s=0.5)]
    return ClosingTable(
        setting="tiny target, cpu, T = 0, 2 prompts",
        methods=(
            result("vanilla", "float32", vanilla, 0),
            result("vanilla", "bfloat16", fastest, 0),
            result("chain", "float32", chain, 3),
            result("typical", "float32", chain, 3, lossless=False),
        ),
        one_pass=OnePass(2.6, Interval(2.33, 2.0, 2.6), (0.9, 0.8, math.nan), (0.8, 0.7, 0.5)),
        run_id="0123abc",
        checkpoint="runs/last.ckpt",
        ui="mlflow ui --backend-store-uri sqlite:////x/mlruns/mlflow.db",
        page="#/experiments/1/runs/0123abc",
    )


def test_a_row_is_measured_by_the_definitions() -> None:
    vanilla, fastest, chain, _ = measured().methods
    assert chain.tau.value == (10 + 4) / 6 and vanilla.tau == Interval(1.0, 1.0, 1.0)
    assert [alpha.value for alpha in chain.n_alpha] == [5 / 6, 2 / 5, 1 / 2] and chain.histogram == (1, 3, 1, 1)
    assert [share.value for share in chain.accepted] == [1 / 6, 3 / 6, 1 / 6, 1 / 6]
    assert chain.engine_tau == 8 / 6 + 1
    assert (chain.prompts, chain.tokens, chain.looping) == (2, 16, Interval(0.0, 0.0, 0.0))
    assert chain.tau_tidy == chain.tau
    assert chain.tokens_per_s.value == pytest.approx(16 / 8)
    assert chain.speedup.value == pytest.approx(16 / 8)  # 16 s of vanilla on the same tokens
    assert chain.speedup_fastest.value == pytest.approx(8 / 8)
    assert (vanilla.speedup.value, vanilla.speedup_fastest.value) == pytest.approx((1, 0.5))
    assert (fastest.speedup.value, fastest.speedup_fastest.value) == pytest.approx((1, 1))
    assert chain.seconds == {"prefill": 2.0, "draft": 1.5, "verify": 4.5, "host": 0.0}


def test_the_turns_of_a_prompt_are_resampled_together() -> None:
    first, second = answer([0] * 10, 3, verify_s=9.0), answer([3] * 10, 3, verify_s=9.0)
    together = [Answered(first.turns + second.turns, first.seconds + second.seconds)]
    row = method_result("chain", "float32", together, together, together, 3, torch.Generator().manual_seed(0))
    assert row.tau == Interval(50 / 20, 50 / 20, 50 / 20)
    assert (row.prompts, row.tokens, row.tokens_per_s.value) == (1, 52, 52 / 20)


def test_loops_are_shown_as_a_share_and_tau_with_and_without_them() -> None:
    looped = Answered((Decoded((7,) * 11, (Round(3, 3, 4), Round(3, 3, 4)), "length"),), 1.0)
    tidy = Answered((Decoded(tuple(range(11)), (Round(2, 1, 2), Round(1, 0, 1)), "end"),), 1.0)
    draw = torch.Generator().manual_seed(0)
    row = method_result("chain", "float32", *[[looped, tidy]] * 3, 3, draw)
    assert (row.looping, row.tau.value) == (Interval(0.5, 0.0, 1.0), 11 / 4)
    assert row.tau_tidy == Interval(3 / 2, 3 / 2, 3 / 2), "resamples of nothing but loops have no tau"
    alone = method_result("chain", "float32", *[[looped]] * 3, 3, draw)
    assert math.isnan(alone.tau_tidy.value) and alone.looping.value == 1.0


def test_several_tasks_and_laws_make_a_table_each_with_a_column_a_task_and_their_mean() -> None:
    table = several()
    blocks = [block.splitlines() for block in as_text(table).split("\n\n")[1:-1]]
    heads = [block[0].split("  ")[0] for block in blocks]
    per_law = ["speed-up [95 %]", "over fastest vanilla", "tokens/s [95 %]", "tau [95 %]"]
    per_law += ["tau without loops (their share)", "n-alpha", "rounds by accepted drafts", "time"]
    assert heads == [f"{law}: {what}" for law in ("T0", "T1") for what in per_law]
    for block in blocks:
        assert len({len(line) for line in block}) == 1 and len(block[0]) <= 120
    mean = next(o for o in table.overall if (o.law, o.name) == ("T1", "lookup"))
    rows = [r for r in table.methods if (r.law, r.name) == ("T1", "lookup")]
    shown = re.split("  +", blocks[8][-1])
    assert shown == ["lookup, float32", *(str(r.speedup) for r in rows), str(mean.speedup)]
    assert re.split("  +", blocks[4][-1])[1] == "2.25 [2.25, 2.25] (50%)"
    markdown = [block.splitlines() for block in as_markdown(table).split("\n\n")[1:-1]]
    assert all(len({line.count("|") for line in block}) == 1 for block in markdown)
    assert len(json.loads(as_json(table))["overall"]) == 6


def test_what_a_reader_must_know_stands_before_where_to_look() -> None:
    text = as_text(replace(measured(), notes=("resumed: 1 of 2 prompts",)))
    assert "\nnote: resumed: 1 of 2 prompts\nrun: 0123abc\n" in text


def test_the_text_lines_up_and_says_everything() -> None:
    text = as_text(measured())
    speed, alphas, histogram, times = (block.splitlines() for block in text.split("\n\n")[1:5])
    assert [row.split("  ")[0] for row in speed[2:]] == [
        "vanilla, float32",
        "vanilla, bfloat16",
        "chain, float32",
        "typical, float32 (lossy)",
    ]
    assert "2.33 [2.00, 2.50]" in speed[4]
    assert [re.split("  +", row)[1:] for row in alphas[2:]] == [
        ["2.33 [2.00, 2.50]", "0.83", "0.40", "0.50"],
        ["2.33 [2.00, 2.50]", "0.83", "0.40", "0.50"],
        ["2.60", "0.90", "0.80", "-"],
        ["2.33 [2.00, 2.60]", "0.80", "0.70", "0.50"],
    ]
    assert histogram[2].split()[2:] == ["1", "3", "1", "1", "2.33"]
    assert times[4].split()[2:] == ["8.0", "25%", "19%", "56%", "0%", "16", "2", "0%"]
    for block in (speed, alphas, histogram, times):
        assert len({len(line) for line in block}) == 1 and len(block[0]) <= 120
    assert text.endswith(
        "run: 0123abc\ncheckpoint: runs/last.ckpt\n"
        "look: mlflow ui --backend-store-uri sqlite:////x/mlruns/mlflow.db  then  #/experiments/1/runs/0123abc\n"
    )


def test_the_markdown_has_a_cell_for_every_column() -> None:
    blocks = [block.splitlines() for block in as_markdown(measured()).split("\n\n")[1:5]]
    for block in blocks:
        assert len({line.count("|") for line in block}) == 1
        assert set(block[1]) <= set("| -:")
    assert blocks[0][4].startswith("| chain, float32 | 2.33 [2.00, 2.50] | 2.33 |")


def test_the_json_keeps_numbers_in_full_and_writes_null_for_what_was_not_measured() -> None:
    read = json.loads(as_json(measured()))
    assert read["methods"][2]["tau"]["value"] == 14 / 6
    assert read["one_pass"]["n_alpha_all"] == [0.9, 0.8, None]
    assert read["run_id"] == "0123abc"


def test_vanilla_alone_makes_a_table_without_drafts() -> None:
    whole = measured()
    vanilla = ClosingTable(whole.setting, whole.methods[:1], None, "r", "-", "-", "-")
    assert "alpha" not in as_text(vanilla) and "accepted" not in as_text(vanilla)
    nothing = ClosingTable(whole.setting, (), None, "r", "-", "-", "-")
    assert as_text(nothing).startswith(f"{whole.setting}\n\nrun: r\n")


def test_where_nothing_was_decoded_only_what_was_read_is_shown() -> None:
    text = as_text(replace(measured(), methods=()))
    assert "one pass, all anchors" in text and "run: 0123abc" in text
    assert "tokens/s" not in text and "prefill" not in text


def test_a_text_that_would_be_too_long_keeps_the_speed_of_every_law_first() -> None:
    whole = as_markdown(several())
    short = as_markdown(several(), most=len(whole) - 1)
    assert len(short) < len(whole) and "closing.txt" in short
    assert as_markdown(several(), most=len(whole)) == whole
    for law in several().laws:
        assert f"| {law}: speed-up" in short
    assert short.splitlines()[-1] == whole.splitlines()[-1], "where to look stands there as ever"
