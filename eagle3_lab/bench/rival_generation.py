"""transformers' own generation beside ours: which ways of it a bench offers, and which setting of each is fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from eagle3_lab.backend.prepacked_linear import PackedLinear
from eagle3_lab.bench.costs import timed
from eagle3_lab.bench.transformers_generate import AS_LOADED, Rival, assisted, lookups, plain
from eagle3_lab.decode.methods import DraftLM, PromptLookup
from eagle3_lab.evaluation.runner import VANILLA, Evaluation
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice

WARM_UP = 8  # tokens


def offered(evaluation: Evaluation, choice: TargetChoice, target: HFTarget) -> list[Rival]:
    """transformers' counterparts of the methods at hand: on our target's model and, where we have laid out its weights
    for ourselves, on the model as transformers loads it."""
    looking = tuple(name for name, method in evaluation.methods.items() if isinstance(method, PromptLookup))
    drafting: dict[str, tuple[TargetChoice, tuple[str, ...]]] = {}
    for name, method in evaluation.methods.items():
        if isinstance(method, DraftLM) and method.target is not None:
            _, names = drafting.get(str(method.target), (method.target, ()))
            drafting[str(method.target)] = method.target, (*names, name)
    found = _on(looking, [(one.load(), names) for one, names in drafting.values()])
    if not any(isinstance(module, PackedLinear) for module in target.model.modules()):
        return found
    loaded = replace(choice, pack=False, probe=False).load()
    drafts = [(replace(one, pack=False, probe=False).load(), names) for one, names in drafting.values()]
    return found + [replace(one, name=one.name + AS_LOADED, on=loaded) for one in _on(looking, drafts)]


def _on(looking: tuple[str, ...], drafts: Sequence[tuple[HFTarget, tuple[str, ...]]]) -> list[Rival]:
    offered = [replace(plain(), beside=(VANILLA,))]
    if looking:
        offered += [replace(one, beside=looking) for one in lookups()]
    for draft, names in drafts:
        offered += [replace(one, beside=names) for one in assisted(draft)]
    return offered


def fastest(
    target: HFTarget,
    entered: Sequence[Rival],
    calibration: Sequence[Sequence[int]],
    limit: int,
    on_step: Callable[[], None],
) -> list[Rival]:
    """Of every rival the setting that was fastest on the calibration prompts, each warmed up first."""
    rates: dict[str, tuple[float, Rival]] = {}
    for rival in entered:
        rival.answer(target, calibration[0], WARM_UP)
        made = []
        for ids in calibration:
            made.append(timed_answer(target, rival, ids, limit))
            on_step()
        rate = sum(tokens for tokens, _ in made) / sum(seconds for _, seconds in made)
        if rival.name not in rates or rate > rates[rival.name][0]:
            rates[rival.name] = rate, rival
    return [rival for _, rival in rates.values()]


def timed_answer(target: HFTarget, rival: Rival, ids: Sequence[int], limit: int) -> tuple[int, float]:
    """Tokens and seconds; the answer ends with the context, as ours do."""
    most = min(limit, target.spec.max_positions - len(ids))
    made, seconds = timed(lambda: rival.answer(target, ids, most), target.device)
    return len(made), seconds
