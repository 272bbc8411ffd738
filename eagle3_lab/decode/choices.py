"""Published shapes of static trees, as lists of sibling ranks.

One string a level, one word a node, one digit a rank.
"""

from __future__ import annotations

from eagle3_lab.decode.grow import StaticTree


class Medusa63(StaticTree):
    """Medusa's static tree, ``mc_sim_7b_63`` of its own repository: 64 nodes with the root, 4 levels. (EAGLE-1's tree
    of that name is another one.) Hydra decodes with it too.

    Source: FasterDecoding/Medusa 11af0aa medusa/model/medusa_choices.py.
    """

    def __init__(self) -> None:
        super().__init__([[int(rank) for rank in path] for level in LEVELS for path in level.split()])


LEVELS = (
    "0 1 2 3 4 5 6 7 8 9",
    "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90",
    "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200",
    "0000 0001",
)
