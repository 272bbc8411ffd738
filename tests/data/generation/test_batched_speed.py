"""How fast the target answers, beside transformers' own batched generate: the same rows, ids and lengths."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.generation.batched import answers
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice

ROWS, TOKENS, ROUNDS = 8, 24, 5
QUESTIONS = [
    "Why is the sky blue?",
    "Write a short letter to a friend who has moved to another town, and ask how the new work is going.",
    "What is 17 times 23?",
    "List three fruits.",
    "Explain in simple words how a bicycle stays upright while it is moving.",
    "Translate 'good morning' into French.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes for four people, with amounts in grams.",
]


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process on a CPU, which other processes do not lengthen; wall seconds on a device."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


@pytest.mark.slow
def test_answers_come_about_as_fast_as_from_transformers_generate() -> None:
    """In a process of its own: tests run with every shape checked, which costs our functions 8 % and theirs nothing."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert float(done.stdout.split()[-1]) > 0.9


def main() -> None:
    """Nothing ends before its last token: both do the same work. Alternating; the last word is the ratio of medians."""
    embedded = TargetChoice().load()
    chat = Chat(embedded.tokenizer)
    endless = HFTarget(embedded.model, embedded.tokenizer, dataclasses.replace(embedded.spec, end_tokens=()))
    prompts = [chat.prompt_ids([{"role": "user", "content": text}]) for text in QUESTIONS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=embedded.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=embedded.device)

    def ours() -> list[list[int]]:
        made = answers(endless, prompts, temperature=0.0, max_new_tokens=TOKENS, rows=ROWS)
        return [list(one.tokens) for one in sorted(made, key=lambda one: one.index)]

    def theirs() -> list[list[int]]:
        with torch.inference_mode():
            out = embedded.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0
            )
        return out[:, width:].tolist()

    one, other = ours(), theirs()  # the warm-up: their minimum length forbids the end token, ours takes it as any other
    assert [len(tokens) for tokens in one] == [len(tokens) for tokens in other] == [TOKENS] * ROWS
    assert sum(a[:4] == b[:4] for a, b in zip(one, other, strict=True)) >= ROWS - 1, "the same prompts are answered"
    times = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
    mine, their = (statistics.median(column) for column in zip(*times, strict=True))
    rates = [ROWS * TOKENS / mine, ROWS * TOKENS / their]
    print(f"answers {rates[0]:.1f} tokens/s, generate {rates[1]:.1f}; ratio {their / mine:.3f}")


if __name__ == "__main__":
    main()
