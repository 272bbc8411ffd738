"""Every experiment of the repository: it reads, reads back as itself, and builds and runs on a tiny target."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import VOCAB, write_target
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_lab.__main__ import main
from eagle3_lab.config import build, check, compose
from eagle3_lab.data.chat import Chat
from eagle3_lab.data.module import ConversationData
from eagle3_lab.errors import UserError
from eagle3_lab.experiment import Experiment
from eagle3_lab.pipeline.head_module import build_module
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.training import checkpoint
from eagle3_lab.training.module import DraftModule
from eagle3_lab.types import Batch, TargetSpec

FOLDER = Path(__file__).parents[1] / "experiments"
PAPERS = sorted(f"paper/{path.stem}" for path in FOLDER.glob("paper/*.yaml"))
MEASURED = sorted(f"evaluate/{path.stem}" for path in FOLDER.glob("evaluate/*.yaml"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml")) + MEASURED + PAPERS
NO_HEAD = ("evaluate/no_head",)  # measured as they are: nothing in them is trained
HEADS = ("evaluate/ten_methods",)  # nothing in them is trained, they measure other experiments' heads
START = ("model.start", "first.ckpt")  # a second stage says what it goes on from on the command line


@pytest.mark.parametrize("key", ["features", "answers"])
def test_an_optional_part_of_no_arguments_is_that_part_with_its_defaults(key: str) -> None:
    parsed = vars(check(compose(FOLDER / "eagle3.yaml", [(key, "{}")]), Experiment).parsed)
    assert parsed[key] is not None and vars(check(compose(FOLDER / "eagle3.yaml"), Experiment).parsed)[key] is None


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> HFTarget:
    return TargetChoice(str(write_target(tmp_path_factory.mktemp("tiny") / "target"))).load()


@pytest.fixture(scope="module")
def data(tiny_target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> ConversationData:
    """Ten short conversations."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    spoken = [("user", "say {i}"), ("assistant", "{i} and abcdefghijk")]
    lines = [
        {"id": f"c{i}", "temperature": 1.0, "messages": [{"role": r, "content": c.format(i=i)} for r, c in spoken]}
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = ConversationData(str(path), max_length=128, row_length=256, held_out=0)
    assert tiny_target.tokenizer is not None
    made.build(Chat(tiny_target.tokenizer), tiny_target.spec)
    return made


@pytest.fixture
def batch(data: ConversationData) -> Batch:
    return next(iter(data.train_dataloader()))


@pytest.fixture
def make_module(tiny_target: HFTarget, data: ConversationData) -> Callable[..., DraftModule]:
    """Build an experiment's module on the tiny target; ``start`` instead of the file's own beginning."""

    def make(name: str, start: Path | None = None) -> DraftModule:
        experiment = read(name)
        model = experiment.model
        size = None if model.draft_vocab is None else 40
        experiment.model = dataclasses.replace(model, draft_vocab=size, start=start, public=None)
        return build_module(experiment, tiny_target, data)

    return make


def read(name: str) -> Experiment:
    small = {"hass_stage2": [START], "sps": [("model.draft.layers", "2")]}  # the tiny target has four layers
    overrides = small.get(name, [])
    return build(check(compose(FOLDER / f"{name}.yaml", overrides), Experiment))


def keep(module: DraftModule, target: HFTarget, path: Path) -> Path:
    """Save it as a run does, without the trainer's own state."""
    said = checkpoint.label(target, module.source, module.draft)
    torch.save({"state_dict": module.state_dict(), checkpoint.KEY: said}, path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    first = check(compose(FOLDER / f"{name}.yaml", [START] if name == "hass_stage2" else []), Experiment)
    (tmp_path / "again.yaml").write_text(first.yaml)
    again = check(compose(tmp_path / "again.yaml"), Experiment)
    assert again.yaml == first.yaml
    assert again.plain == first.plain
    assert first.plain["name"] == Path(name).name


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_says_at_its_head_what_it_is_and_where_its_numbers_come_from(name: str) -> None:
    head = (FOLDER / f"{name}.yaml").read_text().partition("\nname:")[0]
    assert all(line.startswith("# ") for line in head.splitlines())
    assert "arXiv" in head


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*NO_HEAD, *HEADS)])
def test_an_experiment_takes_a_training_step_on_a_tiny_target(
    name: str, make_module: Callable[..., DraftModule], batch: Batch
) -> None:
    module = make_module(name)
    out, steps = module.run(batch, torch.Generator().manual_seed(0))
    out.total.backward()
    assert len(steps) == module.unroll.depth
    assert out.judged.any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_that_is_named_is_one_that_an_experiment_trains(name: str) -> None:
    methods = read(name).evaluate.methods
    named = {method.head for method in methods.values() if method.needs_head}
    assert named and None not in named
    for head in named:
        assert str(head).removeprefix("experiments/") in NAMES
        assert not read(Path(str(head)).name).lacks()


@pytest.mark.parametrize("name", NO_HEAD)
def test_an_experiment_without_a_head_is_measured_on_a_tiny_target(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target.model", str(write_target(tmp_path / "target")), "--target.dtype", "float64"]
    words += ["--evaluate.tasks.0.limit", "1", "--evaluate.max_new_tokens", "6"]
    assert main(["evaluate", str(FOLDER / f"{name}.yaml"), *words, "--tracking.folder", str(tmp_path / "mlruns")]) == 0
    said = capsys.readouterr().out
    assert "T0: method" in said and "T1: method" in said
    assert "pld, float64" in said


def test_hass_differs_from_eagle_in_its_unroll_and_its_losses_alone() -> None:
    eagle, hass = (check(compose(FOLDER / f"{name}.yaml"), Experiment).plain for name in ("eagle", "hass"))
    assert {key for key in eagle if eagle[key] != hass[key]} == {"name", "model"}
    one, other = eagle["model"]["init_args"], hass["model"]["init_args"]
    assert {key for key in one if one[key] != other[key]} == {"unroll", "losses"}


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_target_differs_from_eagle3_in_what_the_target_asks_for_alone(name: str) -> None:
    eagle3, paper = (check(compose(FOLDER / f"{one}.yaml"), Experiment).plain for one in ("eagle3", name))
    differ = {key for key in eagle3 if eagle3[key] != paper[key]}
    assert differ <= {"name", "target", "data", "trainer", "optimizer", "evaluate", "model"}
    one, other = eagle3["model"]["init_args"], paper["model"]["init_args"]
    assert {key for key in one if one[key] != other[key]} <= {"draft_vocab"}


def test_every_target_of_the_paper_has_its_file() -> None:
    models = {read(name).target.model for name in PAPERS}
    assert models == {
        "lmsys/vicuna-13b-v1.3",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.3-70B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    }
    assert read("paper/eagle3_llama33_70b").target.device_map == "auto"


# Sizes of the paper's targets and, in millions, of the heads trained for them: the projection, the layer, the two norms
# and the head of 32000 rows, counted by hand from the widths.
PAPER_SIZES = {
    "eagle3_vicuna_13b": ((5120, 13824, 40, 40, 40, 32000), 638),
    "eagle3_llama31_8b": ((4096, 14336, 32, 32, 8, 128256), 425),
    "eagle3_llama33_70b": ((8192, 28672, 80, 64, 8, 128256), 1403),
    "eagle3_deepseek_r1_llama_8b": ((4096, 14336, 32, 32, 8, 128256), 425),
}


class ShapesAlone(HFTarget):
    """A target without a weight: its head's rows have a shape alone, whatever device the ids are on."""

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(ids), self.spec.hidden, device="meta")


@pytest.mark.parametrize("name", sorted(PAPER_SIZES))
def test_a_papers_head_has_its_published_size(name: str) -> None:
    """Built in shape only: no weight is held."""
    (hidden, intermediate, layers, heads, kv_heads, vocab), millions = PAPER_SIZES[name]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }
    model = read(f"paper/{name}").model
    with torch.device("meta"):
        body = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    spec = TargetSpec(name, hidden, intermediate, layers, heads, kv_heads, hidden // heads, vocab, 1e-5, 2048, (2,))
    kept = torch.arange(vocab if model.draft_vocab is None else model.draft_vocab)
    target = ShapesAlone(body, None, spec)
    with torch.device("meta"):
        model.draft.build(target, model.features.build(target), kept)
    trained = [*model.features.parameters(), *model.draft.parameters()]
    assert round(sum(p.numel() for p in trained) / 1e6) == millions


def test_noise_disturbs_training_alone(make_module: Callable[..., DraftModule], batch: Batch) -> None:
    module = make_module("eagle")

    def loss(seed: int | None) -> float:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return float(module.run(batch, generator)[0].total.detach())

    assert loss(None) == loss(None)
    assert loss(1) == loss(1)
    assert len({loss(None), loss(1), loss(2)}) == 3


def test_each_step_batch_and_rank_draws_noise_of_its_own_again_and_again(
    make_module: Callable[..., DraftModule],
) -> None:
    module = make_module("eagle")

    def drawn(step: int, index: int, rank: int) -> float:
        module._trainer = SimpleNamespace(global_step=step, global_rank=rank)
        return torch.rand((), generator=module._generator(index)).item()

    places = list(itertools.product(range(2), repeat=3))
    assert len({drawn(*place) for place in places}) == 8
    assert [drawn(*place) for place in places] == [drawn(*place) for place in places]


def test_a_second_stage_goes_on_from_the_firsts_weights(
    make_module: Callable[..., DraftModule], tiny_target: HFTarget, tmp_path: Path
) -> None:
    first = make_module("hass_stage1")
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
    second = make_module("hass_stage2", start=keep(first, tiny_target, tmp_path / "first.ckpt"))
    torch.testing.assert_close(dict(second.named_parameters()), dict(first.named_parameters()))


def test_a_draft_vocabulary_comes_along_with_the_weights(
    make_module: Callable[..., DraftModule], tiny_target: HFTarget, tmp_path: Path
) -> None:
    first = make_module("eagle3")
    kept = torch.arange(VOCAB - 40, VOCAB)
    first.draft.build(tiny_target, tiny_target.spec.hidden, kept)
    second = make_module("eagle3", start=keep(first, tiny_target, tmp_path / "first.ckpt"))
    assert torch.equal(second.draft.vocab, kept)


def test_a_start_of_another_family_is_refused_in_one_line(
    make_module: Callable[..., DraftModule], tiny_target: HFTarget, tmp_path: Path
) -> None:
    path = keep(make_module("eagle3"), tiny_target, tmp_path / "eagle3.ckpt")
    with pytest.raises(UserError) as told:
        make_module("hass_stage2", start=path)
    assert str(told.value) == (
        f"command line: model.start: {path}: holds Eagle3 on FusedFeature, the experiment has Eagle1 on TopFeature; "
        "use a YAML with the same model.draft and model.features"
    )
    with pytest.raises(UserError, match=r"no file .*missing\.ckpt"):
        make_module("hass_stage2", start=tmp_path / "missing.ckpt")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("eagle", ("model.draft_vocab", "40"), "draft_vocab must be null for Eagle1"),
        ("eagle", ("model.features", "FusedFeature"), "SmoothL1 needs the target's own feature to compare with"),
        ("eagle_no_feature_loss", ("model.losses.0.weight", "0"), "losses must hold a term with a positive weight"),
    ],
)
def test_a_combination_that_means_nothing_is_refused_in_one_line(
    name: str, change: tuple[str, str], message: str, tiny_target: HFTarget, data: ConversationData
) -> None:
    experiment = build(check(compose(FOLDER / f"{name}.yaml", [change]), Experiment))
    with pytest.raises(UserError, match=message) as told:
        build_module(experiment, tiny_target, data)
    assert "\n" not in str(told.value)
