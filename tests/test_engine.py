"""Engines: what a server says of itself, and vLLM on this machine with heads whose drafts are known."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from solved_heads import answers, chain_of, solved_head, tau

from eagle3_lab.data.chat import Chat
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.engine import VLLM, Addresses, acceptance_length
from eagle3_lab.errors import UserError
from eagle3_lab.formats.description import describe
from eagle3_lab.formats.writing import write
from eagle3_lab.target_model.hf_target import HFTarget

QUESTIONS = ("Write one sentence about rain.", "Name three rivers in Europe and one fact about each.")
TOKENS = 40


def test_acceptance_is_read_off_the_counters_of_either_engine() -> None:
    drafts, accepted = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
    before, after = {drafts: 10.0, accepted: 5.0}, {drafts: 20.0, accepted: 25.0}
    assert acceptance_length(before, after, "there") == 3.0
    assert acceptance_length({}, {"sglang:spec_accept_length": 2.5}, "there") == 2.5
    with pytest.raises(UserError, match="there drafted nothing; start it with the head"):
        acceptance_length(after, after, "there")
    with pytest.raises(UserError, match="there has no metrics of speculation .* SGLang with --enable-metrics"):
        acceptance_length({}, {"other": 1.0}, "there")


def test_a_server_that_is_not_there_and_numbers_that_cannot_be_cost_one_line() -> None:
    nowhere = Addresses("http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1").serve("target", None)
    with pytest.raises(UserError, match=r"engine: http://127.0.0.1:9/v1/models is not reachable .*"), nowhere:
        pass
    with pytest.raises(ValueError, match="is of another machine"):
        Addresses("http://example.org/v1", "http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match=r"engine.batch_sizes must be ascending numbers from 1 on, got \[2, 1\]"):
        VLLM(batch_sizes=[2, 1])
    nowhere = VLLM(python=Path("none/python")).serve("target", None)
    with pytest.raises(UserError, match="engine.python: no file none/python; run `make engine`"), nowhere:
        pass


# ---- vLLM itself


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the engine's environment."""
    file = Path(os.environ.get("EAGLE3_LAB_ENGINE", Path(__file__).parents[1] / ".venv-engine" / "bin" / "python"))
    if not file.is_file():
        pytest.skip(f"no engine: {file} is not there; `make engine` makes it, EAGLE3_LAB_ENGINE names another")
    return file


@pytest.fixture(scope="module")
def prompts(embedded: HFTarget) -> list[list[int]]:
    chat = Chat(embedded.tokenizer)
    return [chat.prompt_ids([{"role": "user", "content": question}]) for question in QUESTIONS]


def served(python: Path, target: HFTarget, head: Path, prompts: list[list[int]]) -> tuple[list[str], float]:
    """vLLM's greedy answers with a head, and its acceptance length."""
    with VLLM(python=python, batch_sizes=[1], startup_s=900, eager=True).serve(target.source, head) as client:
        before = client.metrics()
        done = client.complete_all(prompts, TOKENS, 1)
        return [one.text for one in done], acceptance_length(before, client.metrics(), "vLLM")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "of_source", "of_draft"),
    [
        ("engines", {"layers": [1, 12, 28]}, {"rope_base": 10000.0}),
        ("vllm", {"normed": True}, {"num_layers": 2, "feedback": "post_norm"}),
        ("speculators", {"layers": [1, 12, 20, 28]}, {"heads": 4, "kv_heads": 2, "head_dim": 32}),
    ],
    ids=["both", "eagle3.1, two layers", "speculators, four states"],
)
def test_vllm_drafts_as_this_lab_does(
    to: Any,
    of_source: dict[str, Any],
    of_draft: dict[str, Any],
    python: Path,
    embedded: HFTarget,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    source, draft = FusedFeature(**of_source), Eagle3(head="random", **of_draft)
    solved_head(embedded, source, draft, prompts, TOKENS + 8, 2000)
    ours = answers(embedded, chain_of(embedded, source, draft), prompts, TOKENS)
    assert tau(ours) > 3.9, "every draft is right, but for those past an answer's end"
    write(tmp_path / "head", describe(embedded, source, draft), embedded, to)
    texts, length = served(python, embedded, tmp_path / "head", prompts)
    assert length == pytest.approx(tau(ours), abs=0.1)
    assert texts == [embedded.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in ours]


@pytest.mark.slow
def test_vllm_accepts_what_this_lab_accepts_of_a_head_that_errs(
    python: Path, embedded: HFTarget, prompts: list[list[int]], tmp_path: Path
) -> None:
    source, draft = FusedFeature([1, 12, 28]), Eagle3(head="random", rope_base=10000.0)
    solved_head(embedded, source, draft, prompts, TOKENS + 8, 2000, wrong_every=3)
    ours = tau(answers(embedded, chain_of(embedded, source, draft), prompts, TOKENS))
    assert 1.2 < ours < 3.8, "some drafts are wrong"
    write(tmp_path / "head", describe(embedded, source, draft), embedded)
    _, length = served(python, embedded, tmp_path / "head", prompts)
    assert length == pytest.approx(ours, abs=0.1)
