"""The package's own conversations: where they lie, and the command that remakes them.

    python -m eagle3_lab.pipeline.packaged_data --seed 0

About 800 prompts. 200 were written for this project over five kinds of task (conversation, mathematics, instruction,
code, summary; some with a second turn); the others are user turns that the embedded target wrote itself from the
opening of its chat template. The embedded target answered all of them once, turn by turn: the held-out part greedily
in float32, the rest at temperature 0.8 in bfloat16. 32 further self-written prompts are kept unanswered, for the
quickstart to answer.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

from eagle3_lab import seeds
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.generation.batched import answers
from eagle3_lab.data.repetition import is_looping
from eagle3_lab.data.sources.self_written import user_opening
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice

RESOURCES = Path(str(files("eagle3_lab") / "resources"))
CONVERSATIONS = RESOURCES / "conversations.jsonl.gz"
MANIFEST = RESOURCES / "conversations.manifest.json"
PROMPTS = RESOURCES / "prompts.jsonl"
FRESH = RESOURCES / "fresh_prompts.jsonl.gz"

SELF_WRITTEN = 600
FRESH_PROMPTS = 32
HELD_OUT_EVERY = 8  # of each source, every eighth prompt is held out and answered greedily
TEMPERATURE = 0.8
MAX_NEW_TOKENS = 320
MAX_PROMPT_TOKENS = 700
MAX_USER_TOKENS = 120
LICENCE = "Apache-2.0; answers and self-written prompts by SmolLM2-135M-Instruct (Apache-2.0), 4-bit de-quantised"


def make(seed: int, rows: int) -> dict[str, object]:
    """Write all four resource files; returns the manifest."""
    began = time.time()
    fast, exact = TargetChoice(dtype=torch.bfloat16).load(), TargetChoice(dtype=torch.float32).load()
    written = [json.loads(line) for line in PROMPTS.read_text("utf-8").splitlines()]
    own = [{"id": p["id"], "source": f"written/{p['kind']}", "turns": p["turns"]} for p in written]
    turns = self_written(fast, SELF_WRITTEN + FRESH_PROMPTS, seed, rows)
    self_turns = [{"id": f"self-{i:03d}", "source": "self-written", "turns": [turn]} for i, turn in enumerate(turns)]
    fresh, self_turns = self_turns[:FRESH_PROMPTS], self_turns[FRESH_PROMPTS:]

    held = [p for source in (own, self_turns) for i, p in enumerate(source) if i % HELD_OUT_EVERY == 0]
    held_ids = {p["id"] for p in held}
    train = [p for p in own + self_turns if p["id"] not in held_ids]
    rows_out = converse(exact, held, 0.0, seed, rows) + converse(fast, train, TEMPERATURE, seed, rows)

    text = write_rows(CONVERSATIONS, rows_out)
    write_rows(FRESH, [{"id": p["id"], "turns": p["turns"]} for p in fresh])
    manifest = {
        "command": f"python -m eagle3_lab.pipeline.packaged_data --seed {seed} --rows {rows}",
        "target": exact.spec.name,
        "weights_hash": exact.spec.weights_hash,
        "tokenizer_hash": exact.spec.tokenizer_hash,
        "template_hash": exact.spec.template_hash,
        "sha256": hashlib.sha256(text).hexdigest(),
        "sampling": {
            "train": {"temperature": TEMPERATURE, "dtype": "bfloat16"},
            "held_out": {"temperature": 0.0, "dtype": "float32"},
        },
        "max_new_tokens": MAX_NEW_TOKENS,
        "conversations": len(rows_out),
        "by_source": dict(Counter(row["source"] for row in rows_out)),
        "by_split": dict(Counter(row["split"] for row in rows_out)),
        "looping": sum(row["looping"] for row in rows_out),
        "cut": sum(row["cut"] for row in rows_out),
        "not_exact": sum(not row["exact"] for row in rows_out),  # the text reads back as other token ids
        "answer_tokens": sum(row["answer_tokens"] for row in rows_out),
        "minutes": round((time.time() - began) / 60, 1),
        "licence": LICENCE,
    }
    MANIFEST.write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def write_rows(path: Path, rows: list[dict]) -> bytes:
    """Write one JSON object a line, compressed, the same bytes for the same rows; returns the text."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text, compresslevel=9, mtime=0))
    return text


def self_written(target: HFTarget, wanted: int, seed: int, rows: int) -> list[str]:
    """User turns that the target writes from the opening of its chat template, filtered and without repeats."""
    opening = user_opening(target)
    found: dict[str, str] = {}
    batch = 0
    while len(found) < wanted:
        prompts = [opening] * 300
        made = answers(
            target,
            prompts,
            temperature=TEMPERATURE,
            max_new_tokens=MAX_USER_TOKENS,
            rows=rows,
            seed=seeds.packaged_seed(seed, batch),
        )
        for answer in sorted(made, key=lambda a: a.index):
            text = text_of(target, answer.tokens).strip()
            if not answer.cut and usable(text) and not is_looping(answer.tokens):
                found.setdefault(" ".join(text.lower().split()[:8]), text)
        batch += 1
        say(f"self-written prompts: {len(found)} of {wanted}")
    return list(found.values())[:wanted]


def usable(text: str) -> bool:
    """A turn of sensible length, of printable text (line ends allowed), without template markers."""
    return 4 <= len(text.split()) <= 100 and text.replace("\n", " ").isprintable() and "<|" not in text


def converse(target: HFTarget, prompts: list[dict], temperature: float, seed: int, rows: int) -> list[dict]:
    """Let the target answer each prompt's turns one after the other; a cut answer ends its conversation."""
    talks = [
        {
            "id": p["id"],
            "source": p["source"],
            "split": "held_out" if temperature == 0 else "train",
            "temperature": temperature,
            "cut": False,
            "looping": False,
            "exact": True,
            "answer_tokens": 0,
            "messages": [],
        }
        for p in prompts
    ]
    chat = Chat(target.tokenizer)
    for turn in range(max(len(p["turns"]) for p in prompts)):
        going = [
            i
            for i, (p, talk) in enumerate(zip(prompts, talks, strict=True))
            if turn < len(p["turns"]) and not talk["cut"] and len(talk["messages"]) == 2 * turn
        ]
        for i in going:
            talks[i]["messages"].append({"role": "user", "content": prompts[i]["turns"][turn]})
        ids = [chat.prompt_ids(talks[i]["messages"]) for i in going]
        fits = [j for j, x in enumerate(ids) if len(x) <= MAX_PROMPT_TOKENS]
        made = answers(
            target,
            [ids[j] for j in fits],
            temperature=temperature,
            max_new_tokens=MAX_NEW_TOKENS,
            rows=rows,
            seed=seed,
            turn=turn,
        )
        for done, answer in enumerate(made, 1):
            talk = talks[going[fits[answer.index]]]
            text = text_of(target, answer.tokens)
            talk["messages"].append({"role": "assistant", "content": text})
            talk["cut"] = answer.cut
            taught = chat.taught(talk["messages"][:-1], text, cut=answer.cut)
            talk["exact"] = talk["exact"] and taught == list(answer.tokens)
            talk["looping"] = talk["looping"] or is_looping(answer.tokens)
            talk["answer_tokens"] += len(answer.tokens)
            if done % 25 == 0:
                say(f"temperature {temperature}, turn {turn + 1}: {done} of {len(fits)} answered")
        for i in going:  # a turn that does not fit ends its conversation
            if talks[i]["messages"][-1]["role"] == "user":
                talks[i]["messages"].pop()
    return [talk for talk in talks if talk["messages"]]


def text_of(target: HFTarget, tokens: Sequence[int]) -> str:
    """Tokens as text, special ones dropped."""
    return str(target.tokenizer.decode(list(tokens), skip_special_tokens=True))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=48, help="prompts answered side by side")
    options = parser.parse_args()
    print(json.dumps(make(options.seed, options.rows), indent=2))


if __name__ == "__main__":
    main()
