"""A feature store in the making that never ends by itself: run as a program, to be killed.

python making.py FOLDER    one document a shard, and a pause after each
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from random_targets import random_target

from eagle3_lab.data.conversations import Conversation
from eagle3_lab.data.documents import Document
from eagle3_lab.data.feature_store.features import Features, Making
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.types import Needs

NEEDS = Needs(layers=(1, 2), top=True)
LENGTHS = [9, 5, 12, 7, 3, 8]


def target() -> HFTarget:
    return random_target(dtype=torch.float32)


def documents() -> list[Document]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for length in LENGTHS:
        ids = torch.randint(2, 97, (length,), generator=draw, dtype=torch.int32)
        found.append(Document(Conversation(str(len(found)), ()), ids, torch.arange(length) > 1))
    return found


def making(folder: Path, model: HFTarget, dtype: str = "float32", shard_bytes: int = 1, **more: object) -> Making:
    features = Features(dtype=dtype, folder=folder, **more)
    return Making(folder, features.contents(model, NEEDS, documents(), "d0"), documents(), shard_bytes)


if __name__ == "__main__":
    model = target()
    making(Path(sys.argv[1]), model).make(model, 16, 2, on_tokens=lambda tokens: time.sleep(0.2))
