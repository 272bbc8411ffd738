"""`generate`: what it prints is what the target says, whole characters only, with accepted drafts marked."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from tiny import CHATML, TinyLab, make_tokenizer

from eagle3_lab import load
from eagle3_lab.__main__ import main
from eagle3_lab.data.chat import Chat, Message
from eagle3_lab.decode.loop import decode
from eagle3_lab.decode.methods import DraftLM
from eagle3_lab.decode.propose.vanilla import Vanilla
from eagle3_lab.decode.sampling import SamplingLaw
from eagle3_lab.decode.verify import ExactVerifier
from eagle3_lab.pipeline.chat_session import ChatSession, summary
from eagle3_lab.pipeline.context import open_training
from eagle3_lab.system.terminal import DRAFTED, PLAIN, Ink, TextStream
from eagle3_lab.target_model.hf_target import HFTarget
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.training import checkpoint
from eagle3_lab.types import Decoded, Needs, Round

LIMIT = 24

EXPERIMENT = """
name: tiny
target: {{model: {target}, dtype: float64}}
data: {{path: {data}, max_length: 128, row_length: 128}}
model:
  features: FusedFeature
  draft: {{class_path: Eagle3, init_args: {{head: target}}}}
  unroll: {{depth: 2}}
  losses: [{{class_path: SoftCE, init_args: {{weight: 1.0}}}}]
  draft_vocab: 40
optimizer: {{lr: 1.0e-3}}
trainer: {{max_steps: 1}}
evaluate:
  tasks: [{{name: held_out}}]
  max_new_tokens: 8
  methods:
    chain: {{class_path: HeadTree, init_args: {{grow: {{class_path: Chain, init_args: {{length: 3}}}}}}}}
    lookup: {{class_path: PromptLookup, init_args: {{length: 3, full: false}}}}
tracking: {{folder: {runs}}}
"""


@pytest.fixture(scope="module")
def target(tiny: TinyLab) -> HFTarget:
    return TargetChoice(str(tiny.target), dtype=torch.float64).load()


@pytest.fixture
def untrained(tiny: TinyLab, tmp_path: Path) -> Path:
    """An experiment that has no head yet."""
    file = tmp_path / "tiny.yaml"
    file.write_text(EXPERIMENT.format(target=tiny.target, data=tiny.data, runs=tmp_path / "mlruns"))
    return file


@pytest.fixture(scope="module")
def trained(tiny: TinyLab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with the checkpoint that `fit` would leave; how well it drafts does not matter here."""
    folder = tmp_path_factory.mktemp("trained")
    file = folder / "tiny.yaml"
    file.write_text(EXPERIMENT.format(target=tiny.target, data=tiny.data, runs=folder / "mlruns"))
    experiment = load(str(file))
    context = open_training(experiment, "fit")
    module, place = context.module, context.folder.draft
    place.parent.mkdir(parents=True)
    label = checkpoint.label(context.target, module.source, module.draft)
    torch.save({"state_dict": module.state_dict(), checkpoint.KEY: label}, place)
    return file


def plainly(target: HFTarget, messages: list[Message]) -> str:
    """What the target says by itself, read as a whole."""
    ids = Chat(target.tokenizer).prompt_ids(messages)
    (decoded,) = decode(
        target.open(1, len(ids) + LIMIT + 2, Needs(logits=True)), Vanilla(), SamplingLaw(), ExactVerifier(),
        torch.tensor([ids]), torch.tensor([len(ids)]), max_new_tokens=LIMIT, end_tokens=target.spec.end_tokens,
        context_limit=target.spec.max_positions, generators=[torch.Generator()],
    )  # fmt: skip
    return target.tokenizer.decode([t for t in decoded.tokens if t not in target.spec.end_tokens])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


# ------------------------------------------------------------------------------------------------ text while it comes


def test_a_character_of_several_tokens_comes_whole_with_its_last_token() -> None:
    tokenizer = make_tokenizer(CHATML, "<|extra|>")
    tokens = tokenizer("aé🙂", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 7
    stream = TextStream(tokenizer)
    assert [stream.push(t) for t in tokens] == ["a", "", "é", "", "", "", "🙂"]
    assert stream.finish() == ""


@pytest.mark.parametrize("text", ["plain, with spaces  and\nlines", "a🙂b🙂🙂", "naïve 日本語 text", "\ufffd!", " é"])
def test_the_pieces_joined_are_the_whole_text(text: str) -> None:
    tokenizer = make_tokenizer(CHATML, "<|extra|>")
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, tokens), stream.finish()]) == tokenizer.decode(tokens) == text


def test_bytes_that_are_no_character_are_shown_as_the_tokenizer_shows_them() -> None:
    tokenizer = make_tokenizer(CHATML, "<|extra|>")
    smile = tokenizer("🙂", add_special_tokens=False)["input_ids"]
    a = tokenizer("a", add_special_tokens=False)["input_ids"]
    for tokens in ([*smile[:2], *a, *a], [*a, *smile[:3]], [*smile[1:], *smile, *a]):
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.push, tokens), stream.finish()]) == tokenizer.decode(tokens)


def test_a_word_keeps_the_space_that_only_its_context_tells() -> None:
    """Tokenizers of the SentencePiece kind drop a text's first space when they decode."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"\u2581hello": 0, "\u2581world": 1, "ly": 2, "<unk>": 3}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    stream = TextStream(tokenizer)
    assert [stream.push(t) for t in (0, 1, 2, 1)] == ["hello", " world", "ly", " world"]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "environment", "shown"),
    [
        (Terminal(), {}, f"a{DRAFTED}b{PLAIN}"),
        (Terminal(), {"NO_COLOR": ""}, f"a{DRAFTED}b{PLAIN}"),
        (Terminal(), {"NO_COLOR": "1"}, "ab"),
        (io.StringIO(), {}, "ab"),
    ],
)
def test_accepted_drafts_are_coloured_on_a_terminal_that_wants_colours(
    out: io.StringIO, environment: dict[str, str], shown: str
) -> None:
    ink = Ink(out, environment)
    ink.write("a")
    ink.write("", drafted=True)
    ink.write("b", drafted=True)
    assert out.getvalue() == shown


def test_the_closing_line_counts_rounds_and_tokens_and_says_what_cut_the_answer() -> None:
    rounds = (Round(3, 3, 4), Round(1, 0, 1), Round(2, 1, 2))
    decoded = Decoded((1,) * 8, rounds, "length")
    assert summary("dynamic", decoded, 2.0) == (
        "[dynamic: tau 2.33 over 3 rounds, 8 tokens in 2.0 s, 4.0 tokens/s, stopped by --max-new-tokens]"
    )
    assert summary("vanilla", Decoded((1,), (), "end"), 0.5) == "[vanilla: no round, 1 tokens in 0.5 s, 2.0 tokens/s]"


# ------------------------------------------------------------------------------------------------------------ a session


@pytest.mark.parametrize("refused", [False, True])
def test_the_answer_is_the_targets_and_only_accepted_drafts_are_coloured(
    refused: bool,
    tiny: TinyLab,
    target: HFTarget,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    itself = TargetChoice(str(tiny.target), dtype=torch.float64)
    law = SamplingLaw(1.0) if refused else None  # the greedy target refuses some of what it drew itself
    proposer = DraftLM(itself, length=3, adaptive=False, law=law).proposer(target.spec, None)
    session = ChatSession(target, proposer, SamplingLaw(), ExactVerifier(), name="sps", max_new_tokens=LIMIT, seed=0)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    decoded = session.answer("abc")
    text = plainly(target, [user("abc")])
    assert len(text) > 8  # a letter a token
    shown = terminal.getvalue()
    assert shown.replace(DRAFTED, "").replace(PLAIN, "") == text + "\n"
    drafted, place = set(), 1  # the first token is the prefill's
    for done in decoded.rounds:
        drafted |= set(range(place, place + done.accepted))
        place += done.emitted
    marked = "".join(f"{DRAFTED}{c}{PLAIN}" if i in drafted else c for i, c in enumerate(text))
    assert shown == marked + "\n"
    assert drafted and any(r.judged > r.accepted for r in decoded.rounds) == refused
    assert "; in colour: accepted drafts]" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("method", [None, "chain", "lookup", "vanilla"])
def test_every_method_prints_what_the_target_says(
    method: str | None, trained: Path, target: HFTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [] if method is None else ["--method", method]
    assert main(["generate", str(trained), "abc def", "--max-new-tokens", str(LIMIT), *chosen]) == 0
    told = capsys.readouterr()
    assert told.out == plainly(target, [user("abc def")]) + "\n"
    assert f"[{method or 'chain'}: " in told.err  # by default the last one that needs a head
    assert "tokens/s" in told.err


def test_a_checkpoint_can_be_named(
    trained: Path, untrained: Path, target: HFTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    (place,) = (trained.parent / "mlruns").glob("*/*/draft.ckpt")
    line = ["generate", str(untrained), "abc", "--checkpoint-path", str(place), "--max-new-tokens", str(LIMIT)]
    assert main(line) == 0
    assert capsys.readouterr().out == plainly(target, [user("abc")]) + "\n"


def test_without_a_prompt_it_is_a_chat_that_an_empty_line_ends(
    untrained: Path, target: HFTarget, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\nand then\n\nnever read\n"))
    assert main(["generate", str(untrained), "--method", "lookup", "--max-new-tokens", str(LIMIT)]) == 0
    first = plainly(target, [user("abc")])
    second = plainly(target, [user("abc"), {"role": "assistant", "content": first}, user("and then")])
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_a_chat_ends_with_its_input(
    untrained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert main(["generate", str(untrained), "--method", "vanilla", "--max-new-tokens", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_temperature_draws_and_a_seed_repeats(untrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in ("1", "1", "2"):
        line = ["generate", str(untrained), "abc", "--method", "lookup", "--temperature", "1.5", "--seed", seed]
        assert main([*line, "--max-new-tokens", str(LIMIT)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["abc"], "this experiment has no trained head yet; run `fit`, or give --checkpoint-path, or --method vanilla"),
        (["abc", "--method", "chian"], "--method: 'chian' is not in evaluate.methods; did you mean 'chain'?"),
        (["  "], "generate: the prompt is empty; write what is to be answered, or nothing at all for a chat"),
        (["abc", "--max-new-tokens", "0"], "--max-new-tokens: must be >= 1, got 0"),
        (["abc", "--temperature", "-1"], "--temperature: temperature must be finite and >= 0, got -1.0"),
        (["abc", "--checkpoint-path", "nowhere.ckpt"], "checkpoint: no file nowhere.ckpt; train one with `fit`"),
        (
            ["abc", "--method", "lookup", "--checkpoint-path", "x.ckpt"],
            "--checkpoint-path: x.ckpt holds a head, and lookup proposes with none of this experiment's; choose",
        ),
        (["a" * 300, "--method", "vanilla"], "leaves no room for an answer in the target's context of 256"),
    ],
)
def test_a_mistake_costs_one_line(
    arguments: list[str], words: str, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(untrained), *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.rstrip("\n").splitlines()[-1].endswith(words) or words in told.err.splitlines()[-1]


def test_a_head_of_another_setting_is_not_taken_for_this_one(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(trained), "abc", "--model.draft_vocab", "41"]) == 2
    assert "no trained head yet" in capsys.readouterr().err.splitlines()[-1]


def test_the_sampling_law_is_the_evaluations_unless_a_temperature_is_given(untrained: Path) -> None:
    from eagle3_lab.commands.generate import _sampling

    experiment = load(
        str(untrained),
        "evaluate.laws=" + json.dumps({"half": {"class_path": "SamplingLaw", "init_args": {"temperature": 0.5}}}),
    )
    assert _sampling(experiment, None).temperature == 0.5
    assert _sampling(experiment, 0.0).temperature == 0.0
    assert _sampling(load(str(untrained)), None).temperature == 0.0
