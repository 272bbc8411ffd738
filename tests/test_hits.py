"""The hit table read document by document: the parts add up to the whole."""

from __future__ import annotations

import torch
from tiny import TinyLab

from eagle3_lab.data.chat import Chat
from eagle3_lab.data.module import ConversationData
from eagle3_lab.draft.eagle3 import Eagle3
from eagle3_lab.draft.features import FusedFeature
from eagle3_lab.draft.unroll import Unroll
from eagle3_lab.evaluation.metrics import Acceptance
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.training.hit_reading import read_hits
from eagle3_lab.training.loss.terms import SoftCE
from eagle3_lab.training.loss.unrolled import UnrolledLoss
from eagle3_lab.training.module import DraftModule
from eagle3_lab.training.options import Optimization

DEPTH = 3


def test_documents_add_up_to_the_table_and_stand_in_the_datas_order(tiny: TinyLab) -> None:
    target = TargetChoice(str(tiny.target)).load()
    data = ConversationData(str(tiny.data), max_length=96, row_length=128, rows_per_batch=2)
    data.build(Chat(target.tokenizer), target.spec)
    torch.manual_seed(0)
    source, draft = FusedFeature(), Eagle3(head="target")
    draft.build(target, source.build(target), torch.arange(target.spec.vocab))
    module = DraftModule(target, source, draft, Unroll(DEPTH), UnrolledLoss([SoftCE()]), Optimization())
    reading = read_hits(module, data.val_dataloader()[0])
    order = data.held_out_order()
    assert sorted(order) == list(range(len(data.held_out))) and len(reading.documents) == len(order)
    whole = Acceptance(0, 0, 0, (0,) * DEPTH, (0,) * DEPTH)
    for one in reading.documents:
        whole += one.visited
    assert whole == reading.visited and whole.rounds > 0
    anchors, leading = (sum(getattr(one, name) for one in reading.documents) for name in ("whole", "leading"))
    assert anchors == reading.readings["anchors"]
    torch.testing.assert_close(1 + leading / anchors, reading.readings["tau_expected"], rtol=1e-6, atol=0)
    for n in range(DEPTH):
        reached, passed = (sum(getattr(one, name)[n] for one in reading.documents) for name in ("reached", "passed"))
        if reached:
            told = reading.readings[f"step_{n}/n_alpha_all"]
            torch.testing.assert_close(passed / reached, told, rtol=1e-6, atol=0)
    for i, one in zip(order, reading.documents, strict=True):
        supervised = int(data.held_out[i].supervised.sum())
        assert one.visited.emitted == supervised - 1, "all but the answer's first token, which the prefill gives"
        assert one.reached[0] == supervised - 1
