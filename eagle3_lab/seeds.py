"""Seeds of all random streams, each derived here from a tuple that names the draw.

The tuple holds the run's seed, the purpose, and whatever tells one draw from another of that purpose (task, prompt,
turn, sampling parameters, epoch, step, rank). Different tuples give different streams, so no two draws share numbers.
One sharing is meant: all methods of an evaluation or a bench answer the same turn from the same stream, since methods
that draw the same numbers differ less by chance. Draft tokens that are drawn come from a stream of their own
(`decode.drawn.split`).

torch's CPU generator reads the low 32 bits of a seed only. Of n streams, two agree by chance with a probability of
about n^2 / 2^33: 1 in 8600 for 1000 streams.

Not derived here: the weights that a head starts from, drawn from torch's global generator after
`torch.manual_seed(seed)`, and fixed test inputs.
"""

from __future__ import annotations

import hashlib
import json

import torch


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator at the beginning of the stream of ``seed``."""
    return torch.Generator(device).manual_seed(seed)


def stream(*words: int | str) -> int:
    """Return the seed, in 0 .. 2**32 - 1, of the stream that a tuple of numbers and texts names.

    Hashed, so that neighbouring numbers share nothing; texts are quoted, so that different tuples are different texts.
    """
    text = " ".join(map(json.dumps, words))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


# ------------------------------------------------------------------------------------------------------------ decoding


def evaluation_seed(seed: int, law: str, task: str, prompt: int, turn: int) -> int:
    """Return the seed of one turn's draws in an evaluation, the same for every method.

    Args:
        seed: ``evaluate.seed``.
        law: name of the sampling parameters in ``evaluate.laws``.
        task: name of the task.
        prompt: number of the prompt in its task, from 0.
        turn: number of the turn in the prompt, from 0.
    """
    return stream(seed, "evaluation", law, task, prompt, turn)


def bench_seed(seed: int, part: str, prompt: int) -> int:
    """Return the seed of one answer's draws in a decoding bench, the same for every method; ``part`` is "measured" or
    "calibration", ``prompt`` counts the answers of that part."""
    return stream(seed, "bench", part, prompt)


def chat_seed(seed: int, turn: int) -> int:
    """Return the seed of one answer's draws in `generate`; ``turn`` counts the answers of the chat, from 0."""
    return stream(seed, "chat", turn)


# ------------------------------------------------------------------------------------------------ the training's data


def hash_seed(seed: int, index: int) -> int:
    """Return a 63-bit seed for a pair; neighbours share no bits to speak of.

    Source: SplitMix64's finaliser (Steele, Lea, Flood 2014) over ``seed * 0x9E3779B97F4A7C15 + index + 1``.
    """
    x = (seed * 0x9E3779B97F4A7C15 + index + 1) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1


def answer_seed(seed: int, turn: int, number: int) -> int:
    """Return the seed of the target's answer to turn ``turn`` of conversation ``number`` of the training's data.

    Turn t under ``seed`` shares its numbers with turn t - 1 under ``seed + 1``: two runs of neighbouring seeds do, one
    run does not. Kept as it is, since answers that were made are made again from it.
    """
    return hash_seed(seed + turn, number)


def written_seed(seed: int, batch: int) -> int:
    """Return the seed of one batch of prompts that the target writes; its prompts are numbered below it, as in
    `answer_seed` with turn 0."""
    return hash_seed(seed, batch)


def packaged_seed(seed: int, batch: int) -> int:
    """Return the seed of one batch of the package's own self-written prompts, 1000 apart from the turns of the answers
    in the same file. Kept as the file was made."""
    return seed + 1000 + batch


# ------------------------------------------------------------------------------------------------- training, reporting


def order_seed(seed: int, epoch: int) -> int:
    """Return the seed of one epoch's order of the data."""
    return stream(seed, epoch)


def noise_seed(seed: int, step: int, batch: int, rank: int) -> int:
    """Return the seed of the noise on one batch of features: of this optimizer step, batch and process alone."""
    return stream(seed, step, batch, rank)


def bootstrap_seed(seed: int, table: str) -> int:
    """Return the seed of the resampling behind one table's intervals."""
    return stream(seed, "bootstrap", table)
