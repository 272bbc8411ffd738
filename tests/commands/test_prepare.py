"""`prepare`: each source from its raw file to a training run by one YAML; manifests, cards, a look, and kills."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import datasets
import pytest
import yaml
from fake_server import answer, serving
from tiny import CHATML, TinyLab, write_target
from tiny_runs import EXPERIMENT, Ran

import eagle3_lab
from eagle3_lab.__main__ import main
from eagle3_lab.commands.prepare import show_document
from eagle3_lab.config import build, check, compose
from eagle3_lab.data import document_cache
from eagle3_lab.data.generation.prepared_file import manifest_of
from eagle3_lab.data.tasks import TASKS, Task
from eagle3_lab.experiment import Experiment
from eagle3_lab.system.terminal import Ink

ROOT = Path(eagle3_lab.__file__).parents[1]
QUESTIONS = [f"{word} {i}" for i, word in enumerate(["why", "how", "when", "who", "where", "what"] * 4)]
Prepare = Callable[..., Ran]


def run(*words: str) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(words))
    return Ran(code, out.getvalue(), err.getvalue())


RUNS: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _one_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One store for all runs: making one takes seconds."""
    RUNS[:] = [tmp_path_factory.mktemp("runs")]


def experiment(tiny: TinyLab, folder: Path, prompts: object, **more: object) -> Path:
    """The tiny experiment with a prepare section; ``more`` stands in that section."""
    text = yaml.safe_load(EXPERIMENT.format(target=tiny.target, data="prepared", folder=RUNS[0]))
    sampling = {"max_new_tokens": 10, "temperature": 1.0}
    text |= {"prepare": {"prompts": prompts, "sampling": sampling, "held_out": 3, "rows": 4} | more, "evaluate": None}
    text["trainer"] |= {"max_steps": 2, "val_check_interval": 1}
    file = folder / "prepared.yaml"
    file.write_text(yaml.safe_dump(text))
    return file


def write(path: Path, records: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(records) if path.suffix == ".json" else "".join(json.dumps(one) + "\n" for one in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def asked(*turns: str) -> dict:
    return {"messages": [{"role": "user", "content": turn} for turn in turns]}


def talked(question: str, answer: str = "of the source") -> dict:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def prepared(out: str) -> list[dict]:
    file = Path(re.search(r"^conversations: (.*)$", out, re.MULTILINE)[1])
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def files(path: Path, **more: object) -> dict:
    return {"class_path": "PromptFiles", "init_args": {"path": str(path), **more}}


# ------------------------------------------------------------------------------------------------- sources, end to end


def messages_jsonl(folder: Path) -> dict:
    return files(write(folder / "m.jsonl", [asked(q) for q in QUESTIONS]), licence="CC0")


def sharegpt_json(folder: Path) -> dict:
    return files(write(folder / "s.json", [talked(q) for q in QUESTIONS]))


def folder_of_both(folder: Path) -> dict:
    write(folder / "both" / "a.jsonl.gz", [asked(q) for q in QUESTIONS[:12]])
    write(folder / "both" / "deeper" / "b.json", [talked(q) for q in QUESTIONS[12:]])
    return files(folder / "both")


def saved_set(folder: Path) -> dict:
    rows = [{"problem": q, "solution": "s"} for q in QUESTIONS]
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "set"))
    return {"class_path": "HubPrompts", "init_args": {"name": str(folder / "set"), "fields": {"question": ["problem"]}}}


def parquet_set(folder: Path) -> dict:
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "s"}]} for q in QUESTIONS]
    (folder / "parquet").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "parquet" / "train-0.parquet"))
    fields = {"messages": "messages"}
    return {"class_path": "HubPrompts", "init_args": {"name": str(folder / "parquet"), "fields": fields}}


def self_written(folder: Path) -> dict:
    limits = {"min_words": 1, "max_tokens": 60, "rows": 8, "attempts": 40, "temperature": 1.0}
    return {"class_path": "SelfWritten", "init_args": {"count": 12, **limits}}


def mixture(folder: Path) -> dict:
    one, other = (write(folder / f"{n}.jsonl", [asked(f"{n} {q}") for q in QUESTIONS]) for n in "ab")
    parts = [{"prompts": files(one), "weight": 3}, {"prompts": files(other), "weight": 1}]
    return {"class_path": "Mixture", "init_args": {"parts": parts, "total": 20}}


@pytest.fixture(autouse=True)
def _local_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


SOURCES = [messages_jsonl, sharegpt_json, folder_of_both, saved_set, parquet_set, self_written, mixture]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_a_source_goes_from_its_raw_file_to_a_training_run_by_one_yaml(
    source: Callable[[Path], dict], tiny: TinyLab, tmp_path: Path
) -> None:
    file = experiment(tiny, tmp_path, source(tmp_path))
    ran = run("fit", str(file))
    assert ran.code == 0, ran.err
    assert "answers: " in ran.err and "training: 2 steps" in ran.err
    again = run("prepare", str(file))
    assert "answers: reused (unchanged)" in again.err
    records = prepared(again.out)
    assert sum(one["split"] == "held_out" for one in records) == 3
    assert all(one["temperature"] == 0.0 for one in records if one["split"] == "held_out")
    assert all(one["messages"][-1]["role"] == "assistant" for one in records)
    assert all(one["messages"][1]["content"] != "of the source" for one in records)


def test_a_mixture_keeps_its_weights(tiny: TinyLab, tmp_path: Path) -> None:
    records = prepared(run("prepare", str(experiment(tiny, tmp_path, mixture(tmp_path)))).out)
    asked_of = [one["messages"][0]["content"][0] for one in records]
    assert 15 >= asked_of.count("a") >= 12 and 5 >= asked_of.count("b") >= 3, "empty answers alone may be missing"


def test_every_turn_is_answered_by_the_target_after_its_own_answers(tiny: TinyLab, tmp_path: Path) -> None:
    talks = [{"messages": [*asked(q)["messages"], *asked("and " + q)["messages"]]} for q in QUESTIONS]
    file = experiment(tiny, tmp_path, files(write(tmp_path / "t.jsonl", talks)))
    ran = run("prepare", str(file), "--show", "2")
    records = prepared(ran.out)
    two = [one for one in records if len(one["messages"]) == 4]
    assert two
    for one in two:
        assert [turn["role"] for turn in one["messages"]] == ["user", "assistant"] * 2
        assert one["messages"][2]["content"] == "and " + one["messages"][0]["content"]
    assert ran.out.count("--- ") == 2 and "[[" in ran.out and "\x1b" not in ran.out


def test_answers_as_they_stand_train_and_held_out_ones_are_the_targets_own(tiny: TinyLab, tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [talked(q) for q in QUESTIONS])
    file = experiment(tiny, tmp_path, files(path), regenerate=False)
    ran = run("fit", str(file))
    assert ran.code == 0, ran.err
    records = prepared(run("prepare", str(file)).out)
    train = [one for one in records if one["split"] == "train"]
    assert len(train) == len(QUESTIONS) - 3
    assert {one["messages"][1]["content"] for one in train} == {"of the source"}
    assert all("temperature" not in one for one in train)
    held = [one for one in records if one["split"] == "held_out"]
    assert all(one["temperature"] == 0 and one["messages"][1]["content"] != "of the source" for one in held)


def test_a_greedy_share_is_answered_greedily(tiny: TinyLab, tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 6, "temperature": 0.7, "greedy_share": 0.5, "top_p": 0.9}
    file = experiment(tiny, tmp_path, messages_jsonl(tmp_path), sampling=sampling)
    train = [one for one in prepared(run("prepare", str(file)).out) if one["split"] == "train"]
    assert {one["temperature"] for one in train} == {0.0, 0.7}


def test_a_server_answers_the_training_part_and_the_target_what_is_held_out(tiny: TinyLab, tmp_path: Path) -> None:
    with serving() as fake:
        fake.reply = lambda body: (200, answer(f"served {len(body['prompt'])}"))
        server = {"url": fake.url, "concurrency": 2}
        file = experiment(tiny, tmp_path, messages_jsonl(tmp_path), server=server)
        ran = run("fit", str(file))
        assert ran.code == 0, ran.err
        assert len(fake.asked()) == len(QUESTIONS) - 3
        records = prepared(run("prepare", str(file)).out)
        assert len(fake.asked()) == len(QUESTIONS) - 3, "what is there is not asked again"
        output = tmp_path / "served.jsonl"
        assert run("prepare", str(file), "--output", str(output)).code == 0
    assert json.loads(manifest_of(output).read_text())["served_by"] == "tiny"
    for record in records:
        assert record["messages"][1]["content"].startswith("served ") == (record["split"] == "train")


def test_what_no_prepare_wrote_is_never_overwritten(tiny: TinyLab, tmp_path: Path) -> None:
    prompts = tmp_path / "m.jsonl"
    file = experiment(tiny, tmp_path, files(write(prompts, [asked(q) for q in QUESTIONS])))
    before = prompts.read_bytes()
    ran = run("prepare", str(file), "--output", str(prompts))
    assert ran.code == 2 and len(ran.complaints) == 1
    assert f"--output: {prompts} is there and has no m.manifest.json beside it; name a new file" in ran.complaints[0]
    assert prompts.read_bytes() == before
    ran = run("prepare", str(file), "--output", str(tmp_path / "o.jsonl.gz"))
    assert ran.code == 2 and "plain text is written; name a file without .gz" in ran.complaints[0]
    output = tmp_path / "o.jsonl"
    for _ in range(2):  # its own file may be written anew
        assert run("prepare", str(file), "--output", str(output)).code == 0


def test_an_output_of_nothing_is_refused_before_the_target_is_loaded(tiny: TinyLab, tmp_path: Path) -> None:
    file = experiment(tiny, tmp_path, messages_jsonl(tmp_path))
    ran = run("prepare", str(file), "--prepare", "null", "--data.path", str(tiny.data), "--output", "o.jsonl")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "--output: o.jsonl: nothing is prepared here; a prepare section is needed\n"


def test_an_output_that_another_prepare_writes_is_left_alone(tiny: TinyLab, tmp_path: Path) -> None:
    file = experiment(tiny, tmp_path, files(write(tmp_path / "m.jsonl", [asked(q) for q in QUESTIONS])))
    output, link = tmp_path / "out" / "o.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(output)
    words = [sys.executable, "-m", "eagle3_lab", "prepare", str(file), "--output", str(output)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while not list(output.parent.glob(".*.lock")) and first.poll() is None:
            time.sleep(0.005)
        time.sleep(0.05)  # between making the file and locking it
        first.send_signal(signal.SIGSTOP)
        try:
            assert not output.exists(), "it was stopped at work"
            for name in (output, link):
                ran = run("prepare", str(file), "--output", str(name))
                assert (ran.code, ran.out) == (2, "")
                assert ran.complaints == [
                    f"--output: {name} is being written by another process; wait for its end, or name another file"
                ]
        finally:
            first.kill()
    assert run("prepare", str(file), "--output", str(output)).code == 0, "a lock ends with its process"


def test_a_finished_file_that_lost_lines_is_not_taken_for_whole(tiny: TinyLab, tmp_path: Path) -> None:
    file = experiment(tiny, tmp_path, files(write(tmp_path / "m.jsonl", [asked(q) for q in QUESTIONS])))
    said = run("prepare", str(file)).out
    kept = Path(next(line for line in said.splitlines() if line.startswith("conversations: ")).partition(": ")[2])
    kept.write_bytes(b"".join(kept.read_bytes().splitlines(keepends=True)[:-2]))
    ran = run("prepare", str(file))
    assert ran.code == 2 and len(ran.complaints) == 1
    assert f"{kept}: is not what" in ran.complaints[0] and "remove it" in ran.complaints[0]


# ----------------------------------------------------------------------------------------------- manifest, card, look


def test_the_manifest_says_what_the_file_is(tiny: TinyLab, tmp_path: Path) -> None:
    twice = [asked(q) for q in [*QUESTIONS, QUESTIONS[0].upper()]]
    file = experiment(tiny, tmp_path, files(write(tmp_path / "m.jsonl", [*twice, asked(" ")]), licence="CC0"))
    output = tmp_path / "out" / "talks.jsonl"
    ran = run("prepare", str(file), "--output", str(output))
    assert ran.code == 0, ran.err
    manifest = json.loads(manifest_of(output).read_text())
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert manifest["licences"] == {"m": "CC0"}
    assert "licence of m: CC0" in ran.out
    assert manifest["conversations"] == len(records)
    assert manifest["answer_tokens"] == sum(one["answer_tokens"] for one in records)
    assert manifest["cut"] == sum(one["cut"] for one in records)
    prompts, answers = manifest["stages"]
    assert prompts["dropped"] == {"asks what another asks": 1, "empty question": 1}
    assert prompts["kept"] == len(QUESTIONS) == answers["kept"] + sum(answers["dropped"].values())
    assert manifest["target"]["template_hash"] and manifest["sampling"]["seed"] == 0
    card = json.loads((tmp_path / "out" / "talks.card.json").read_text())
    assert card["parts"]["held_out"]["conversations"] == 3
    assert 0 < card["draft_vocabulary"]["coverage"]["train"] <= 1


STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system') }}{% endif %}" + CHATML


def test_the_card_shows_what_became_of_every_conversation_from_the_raw_file_on(tiny: TinyLab, tmp_path: Path) -> None:
    """22 conversations, of which 12 train or validate; the template refuses a system turn, and the job goes on."""
    system = {"role": "system", "content": "s"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    lines = [
        *({"id": None, "messages": asked(f"{i} {q}")["messages"]} for i, q in enumerate(QUESTIONS[:14])),
        {"id": "s1", "messages": [system, *asked("refused")["messages"]]},
        {"id": "s2", "system": "s", "messages": asked("refused too")["messages"]},
        asked(" "),
        asked(f"0 {QUESTIONS[0]}!"),
        {"messages": asked("tools")["messages"], "tools": [{"function": {"name": "f"}}], "id": "t"},
        {"messages": [*asked("seen")["messages"], called, {"role": "tool", "content": "r"}], "images": ["i.png"]},
        asked("x" * 300),
        {"conversations": []},
    ]
    target = write_target(tmp_path / "strict", template=STRICT)
    file = experiment(tiny, tmp_path, files(write(tmp_path / "raw.jsonl", lines)))
    output, words = tmp_path / "out.jsonl", ["--target.model", str(target), "--data.limit", "9"]
    ran = run("prepare", str(file), "--output", str(output), *words)
    assert ran.code == 0, ran.err
    card = json.loads((tmp_path / "out.card.json").read_text())
    prompts, answers, read, train, held = card["counts"]
    assert (prompts["stage"], prompts["seen"], prompts["kept"]) == ("prompts", 22, 15)
    assert prompts["dropped"] == {
        "the chat template refuses it (TemplateError: No system)": 2,
        "the chat template does not render tools": 1,
        "empty question": 1,
        "asks what another asks": 1,
        "images, which is not read": 1,
        "no turns": 1,
    }
    assert prompts["named"]["the chat template refuses it (TemplateError: No system)"] == ["s1", "s2"]
    assert answers["seen"] == prompts["kept"] and answers["dropped"]["longer than the target reads"] == 1
    assert read["seen"] == answers["kept"] == read["kept"] == train["seen"] + held["seen"]
    assert held["seen"] == read["kept"] - train["seen"] and held["kept"] == card["parts"]["held_out"]["conversations"]
    assert train["kept"] == card["parts"]["train"]["conversations"]
    for report in card["stages"]:
        assert report in ran.out
    assert "prompts: 15 of 22 conversations; dropped" in ran.out and ": s1, s2)" in ran.out
    for part in card["parts"].values():
        assert 1 <= part["rows"] <= part["documents"]
    ids = [json.loads(line)["id"] for line in output.read_bytes().splitlines()]
    assert len(set(ids)) == len(ids) and "None" not in ids


def test_the_card_is_kept_in_the_run(tiny: TinyLab, tmp_path: Path) -> None:
    prompts = files(write(tmp_path / "mine.jsonl", [asked(q) for q in QUESTIONS]))
    ran = run("fit", str(experiment(tiny, tmp_path, prompts)))
    assert ran.code == 0, ran.err
    run_id = re.search(r"^run: (\w+)", ran.out, re.MULTILINE)[1]
    (found,) = RUNS[0].glob(f"**/{run_id}/**/data_card.txt")
    assert "licence of mine: not stated" in found.read_text()
    assert "draft vocabulary: 64 of 300 ids" in found.read_text()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_supervised_tokens_are_coloured_on_a_terminal_that_wants_it(tiny: TinyLab, tmp_path: Path) -> None:
    made = build(check(compose(experiment(tiny, tmp_path, messages_jsonl(tmp_path))), Experiment))
    from eagle3_lab.pipeline import inputs

    target = inputs.load_target(made)
    document = inputs.build_data(made, target).train[0]
    answer = document.conversation.messages[1]["content"]
    end = "" if document.conversation.cut else "<|im_end|>"
    for environment, expected in (({}, f"\x1b[32m{answer}{end}\x1b[0m"), ({"NO_COLOR": "1"}, f"[[{answer}{end}]]")):
        out = Terminal()
        show_document(document, target.tokenizer, Ink(out, environment))
        assert expected in out.getvalue()
        assert ("\x1b" in out.getvalue()) == (not environment)


def test_encoded_documents_are_kept_for_the_next_command_and_a_dry_run_keeps_none(
    tiny: TinyLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_cache, "FEWEST", 10)
    (tmp_path / "x.yaml").write_text(EXPERIMENT.format(target=tiny.target, data=tiny.data, folder=RUNS[0]))
    kept = tmp_path / "cache" / "documents"
    assert "documents: 0/" in run("fit", str(tmp_path / "x.yaml"), "--dry-run").err and not kept.exists()
    first, second = (run("prepare", str(tmp_path / "x.yaml")) for _ in range(2))
    assert len(list(kept.iterdir())) == 1 and first.out == second.out
    assert "documents: reused" not in first.err and "documents: reused (unchanged)" in second.err
    assert "documents: reused" in run("fit", str(tmp_path / "x.yaml"), "--dry-run").err


# ------------------------------------------------------------------------------------------------------------ overlap


def test_prompts_that_are_measured_on_are_found_counted_and_removed(tiny: TinyLab, tmp_path: Path) -> None:
    long = " ".join(f"word{i}" for i in range(20))
    measured = write(tmp_path / "eval.jsonl", [{"turns": [QUESTIONS[2]]}, {"turns": [long]}])
    lines = [asked(q) for q in QUESTIONS] + [asked(f"before it {long.upper()}!")]
    file = experiment(
        tiny,
        tmp_path,
        files(write(tmp_path / "m.jsonl", lines)),
        avoid=[{"name": "mine", "path": str(measured)}],
    )
    ran = run("prepare", str(file), "--output", str(tmp_path / "o.jsonl"))
    assert json.loads((tmp_path / "o.manifest.json").read_text())["stages"][0]["dropped"] == {"overlaps with mine": 2}
    texts = {one["messages"][0]["content"] for one in prepared(ran.out)}
    assert QUESTIONS[2] not in texts and not any("word5" in text.lower() for text in texts)


def test_what_the_experiment_measures_on_is_not_trained_on_whatever_the_file(tiny: TinyLab, tmp_path: Path) -> None:
    first = json.loads(tiny.data.read_text().splitlines()[0])["messages"][0]["content"]
    measured = write(tmp_path / "eval.jsonl", [{"turns": [first.upper() + " ?"]}])
    text = yaml.safe_load(EXPERIMENT.format(target=tiny.target, data=tiny.data, folder=tmp_path / "mlruns"))
    text["evaluate"]["tasks"] = [{"name": "mine", "path": str(measured)}]
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(text))
    assert "dropped 1 (overlaps with mine)" in run("prepare", str(tmp_path / "x.yaml")).out


# -------------------------------------------------------------------------------------------------------------- kills


@pytest.mark.slow
def test_a_prepare_killed_anywhere_ends_in_the_same_file(tiny: TinyLab, tmp_path: Path) -> None:
    """SIGKILL after a random while, again and again until it is done; in float32, sampled."""
    talks = [
        {"messages": [*asked(f"{i} {q}")["messages"], *asked("so?")["messages"]]} for i in range(6) for q in QUESTIONS
    ]
    prompts = files(write(tmp_path / "t.jsonl", talks))
    sampling = {"max_new_tokens": 40, "temperature": 1.0}
    file = experiment(tiny, tmp_path, prompts, sampling=sampling, rows=3)
    straight = run("prepare", str(file), "--output", str(tmp_path / "straight.jsonl"))
    assert straight.code == 0, straight.err

    cache = tmp_path / "killed"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "EAGLE3_LAB_CACHE": str(cache)}
    draw = random.Random()
    kills = 0
    words = [sys.executable, "-m", "eagle3_lab", "prepare", str(file), "--output", str(tmp_path / "resumed.jsonl")]
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 900  # on a machine that is busy with other things
    while process.poll() is None and time.monotonic() < deadline:
        if any(path.stat().st_size > 0 for path in cache.glob("prepared/*.unfinished")):
            time.sleep(draw.uniform(0.0, 0.3))
            process.kill()
            kills += 1
            break
        time.sleep(0.005)
    process.wait()
    left = list(cache.glob("prepared/*.unfinished"))
    assert kills == 1 and len(left) == 1, "it was killed at work"
    assert not list(cache.glob("prepared/*.jsonl"))
    before = left[0].read_bytes().count(b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_LAB_CACHE", str(cache))
        resumed = run("prepare", str(file), "--output", str(tmp_path / "resumed.jsonl"))
    assert resumed.code == 0, resumed.err
    assert before >= 1
    for name in ("{}.jsonl", "{}.manifest.json"):
        one, other = ((tmp_path / name.format(kind)).read_bytes() for kind in ("straight", "resumed"))
        assert one == other


# -------------------------------------------------------------------------------------------------------- ready YAMLs


@pytest.mark.parametrize("file", sorted((ROOT / "experiments/data").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_ready_source_stands_in_an_experiment(file: Path, tiny: TinyLab, tmp_path: Path) -> None:
    assert file.read_text().startswith("# ")
    if file.stem in TASKS:
        path = experiment(tiny, tmp_path, messages_jsonl(tmp_path), avoid=[str(file)])
        (task,) = build(check(compose(path), Experiment)).prepare.avoid
        assert task == Task(file.stem)
    else:
        made = build(check(compose(experiment(tiny, tmp_path, str(file))), Experiment))
        assert made.prepare.prompts.licences() == {file.stem: made.prepare.prompts.licence}
        assert "not stated" not in made.prepare.prompts.licence or file.stem == "sharegpt"


def test_the_sources_of_the_papers_and_all_evaluation_sets_are_there() -> None:
    names = {file.stem for file in (ROOT / "experiments/data").glob("*.yaml")}
    assert names == {"ultrachat_200k", "sharegpt", "openthoughts_114k_math", "gsm8k_train", *TASKS}


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--data.path", "x.jsonl"],
            r"data\.path: 'x\.jsonl', but there is a prepare section; set",
        ),
        (["--prepare", "null"], r"data\.path: 'prepared', but the experiment has no prepare section"),
        (["--prepare.rows", "0"], r"prepare\.rows must be >= 1, got 0"),
        (["--prepare.prompts.path", "none.jsonl"], r"no file none\.jsonl"),
        (
            ["--prepare.sampling.max_new_tokens", "255"],
            r"no conversation was answered .*longer than the target",
        ),
        (["--prepare.server.url", "http://127.0.0.1:1/v1", "--prepare.server.retries", "0"], r"models failed, tried 1"),
        (["--prepare.server.url", "http://example.org/v1"], r"of another machine, example\.org"),
        (["--show", "-1"], r"--show: must be >= 0, got -1"),
        (["--target.thinking", "false"], r"target\.thinking: false, but the chat template .* no enable_thinking"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_two(words: list[str], message: str, tiny: TinyLab, tmp_path: Path) -> None:
    ran = run("prepare", str(experiment(tiny, tmp_path, messages_jsonl(tmp_path))), *words)
    assert ran.code == 2
    assert re.search(message, ran.err.splitlines()[-1]), ran.err
    assert "Traceback" not in ran.err


def test_a_target_without_a_template_or_that_does_not_end_there_is_refused_before_it_answers(
    tiny: TinyLab, tmp_path: Path
) -> None:
    file = str(experiment(tiny, tmp_path, messages_jsonl(tmp_path)))
    bare = write_target(tmp_path / "bare", template=None)
    ran = run("prepare", file, "--target.model", str(bare))
    assert (ran.code, "chat template: the tokenizer has none" in ran.err) == (2, True)
    other = write_target(tmp_path / "other", template=CHATML.replace("<|im_end|>", "<|extra|>"))
    ran = run("prepare", file, "--target.model", str(other))
    assert (ran.code, "at which" in ran.err and "does not stop" in ran.err) == (2, True)
    assert "answers: 0/" not in ran.err


def test_a_dry_run_makes_nothing(tiny: TinyLab, tmp_path: Path) -> None:
    ran = run("fit", str(experiment(tiny, tmp_path, messages_jsonl(tmp_path))), "--dry-run")
    assert ran.code == 2
    assert "is not made yet; run `python -m eagle3_lab prepare` first" in ran.err
