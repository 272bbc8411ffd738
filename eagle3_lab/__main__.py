"""`python -m eagle3_lab VERB EXPERIMENT.yaml [--key value ...]`: a command line becomes a call of one typed function.

A verb is a function `verb(experiment: Experiment, *, option: type = default, ...)`. The first word chooses it, the
YAML and the dotted overrides build its experiment, and options of its own name go to it. A mistake is found before what
the verb works with is imported; this module is the only one that parses a command line.

To add a verb, write the function and add a line to `VERBS`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_lab.errors import UserError, near
from eagle3_lab.system.signals import Terminated, sigterm_raises

VERBS: dict[str, tuple[str, str, str]] = {
    "prepare": ("eagle3_lab.commands.prepare", "prepare", "let the target answer prompts; show what is trained on"),
    "fit": ("eagle3_lab.commands.fit", "fit", "train a draft head on the target's answers, making what is missing"),
    "evaluate": ("eagle3_lab.commands.evaluate", "evaluate", "measure acceptance, length and speed by decoding"),
    "ui": ("eagle3_lab.commands.ui", "ui", "look at the runs in the browser"),
    "generate": ("eagle3_lab.commands.generate", "generate", "answer a prompt, or chat, and show accepted drafts"),
    "export": ("eagle3_lab.commands.export", "export", "write a trained head as a folder that vLLM and SGLang load"),
    "ablate": ("eagle3_lab.ablation.ablate", "ablate", "train and measure every cell of an ablation's folder"),
    "report": ("eagle3_lab.ablation.report", "report", "write an ablation's table and figures into its folder"),
    "bench train": (
        "eagle3_lab.bench.train",
        "bench_train",
        "time a training step, and a rival's beside it",
    ),
    "bench prepare": (
        "eagle3_lab.bench.prepare",
        "bench_prepare",
        "time the target's answers, and transformers' batched generate beside them",
    ),
    "bench decode": ("eagle3_lab.bench.decode", "bench_decode", "measure what decoding costs on this machine"),
}
"""Verb -> (module, function, one line of help). The module is imported when the verb begins its work; the function's
signature is read before (`signature_of`)."""

OF_ABLATIONS = ("ablate", "report")
"""Verbs whose first argument is an ablation: a folder. Overrides are then for the experiment of every cell."""

USAGE = "python -m eagle3_lab {verb} EXPERIMENT.yaml [--key value ...] [--print_config] [--help]"
FOLDER_USAGE = "python -m eagle3_lab {verb} FOLDER [--key value ...] [--help]"
BOOLS = ("true", "false", "yes", "no", "on", "off", "null")


@dataclass
class Line:
    """A command line after its verb, split by form alone: which words are options is known only with the verb.

    pairs: (name, value) in order, without leading dashes; the value of a bare option is None.
    words: what is no option, the experiment taken out.
    """

    experiment: str | None = None
    pairs: list[tuple[str, str | None]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, `sys.argv[1:]` by default, and return its exit status.

    0: done. 2: a user's mistake, told in one line on stderr. 130: interrupted, by Ctrl-C. 143: terminated, by SIGTERM.
    A fault of ours is raised as it is.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _refuse_bytes(words)
        with sigterm_raises():
            _run(words)
    except UserError as error:
        print(" ".join(str(error).split("\n")), file=sys.stderr)
        return 2
    except Terminated:
        print("terminated", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _refuse_bytes(words: Sequence[str]) -> None:
    """Refuse what is no text in this terminal's encoding: it could be neither parsed nor kept."""
    for word in words:
        if not word.isascii() and any("\udc80" <= letter <= "\udcff" for letter in word):
            raise UserError(f"{word.encode(errors='surrogateescape')!r}: is no UTF-8 text")


def split(arguments: Sequence[str]) -> Line:
    """Split the words after the verb.

    `--key value` and `--key=value` are pairs; an option followed by another option or by nothing is bare; after a
    lone `--` everything is a word. The experiment is the first word that ends in `.yaml`, else, where `--option`
    stands before it, the first such value (`fit --dry-run x.yaml`), else the first word.
    """
    line = Line()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            line.words += rest
            break
        if not word.startswith("--"):
            line.words.append(word)
            continue
        key, equals, value = word.removeprefix("--").partition("=")
        if equals:
            line.pairs.append((key, value))
        elif rest and not rest[0].startswith("--") and not _is_flag(key):
            line.pairs.append((key, rest.pop(0)))
        else:
            line.pairs.append((key, None))
    _take_experiment(line)
    return line


def _take_experiment(line: Line) -> None:
    yaml = next((word for word in line.words if word.endswith(".yaml")), None)
    taken = next((i for i, (_, value) in enumerate(line.pairs) if value is not None and value.endswith(".yaml")), None)
    if yaml is None and taken is not None:
        key, line.experiment = line.pairs[taken]
        line.pairs[taken] = (key, None)
    elif line.words:
        line.experiment = line.words[0] if yaml is None else yaml
        line.words.remove(line.experiment)


def _is_flag(key: str) -> bool:
    return key.replace("-", "_") in ("help", "print_config")


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return
    if " ".join(arguments[:2]) in VERBS:  # a verb of two words
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    name = arguments[0]
    if name not in VERBS:
        raise UserError(f"{name}: no such verb{near(name, VERBS)}")
    line = split(["--help" if word == "-h" else word for word in arguments[1:]])

    from eagle3_lab import config  # after the verb is known, so that --help and a wrong verb cost nothing

    asks_help = [(key, value) for key, value in line.pairs if key == "help" or key.endswith(".help")]
    if asks_help:
        _print_verb_help(name, *asks_help[0])
        return
    if name in OF_ABLATIONS:
        _run_ablation(name, line)
        return
    if line.experiment is None:
        raise UserError(f"{name}: no experiment given; write: {USAGE.format(verb=name)}")
    path = config.find_experiment(Path(line.experiment))
    config.read(path)  # a mistake in a file is told before torch is imported, which takes seconds

    verb = config.signature_of(*VERBS[name][:2])
    into = _into(name, verb)
    show, options, overrides = _sort(line, verb, into)
    checked = config.check(config.compose(path, overrides), into, also=list(_option_names(verb)))
    if show:
        print(checked.yaml, end="")
        return
    given = config.check_options(verb, options)
    experiment = config.build(checked)
    _load(name)(experiment, **given)


def _run_ablation(name: str, line: Line) -> None:
    """Run a verb on an ablation's folder; overrides are for the experiment of every cell."""
    from eagle3_lab import config

    if line.experiment is None and line.pairs and line.pairs[-1][1] is not None:  # `--list FOLDER`
        key, line.experiment = line.pairs.pop()
        line.pairs.append((key, None))
    if line.experiment is None:
        raise UserError(f"{name}: no folder given; write: {FOLDER_USAGE.format(verb=name)}")
    folder = Path(line.experiment)
    if (folder / "ablation.yaml").is_file():
        config.read(folder / "ablation.yaml")  # a mistake in a file is told before torch is loaded
    verb = _load(name)
    from eagle3_lab.ablation.plan import read_ablation

    _, options, overrides = _sort(line, verb, _into(name, verb))
    given = config.check_options(verb, options)
    verb(read_ablation(folder, overrides), **given)


def _into(name: str, verb: Callable[..., Any]) -> type:
    """The class whose parameters are the keys that a verb's overrides name."""
    if name in OF_ABLATIONS:
        return vars(importlib.import_module("eagle3_lab.experiment"))["Experiment"]
    return typing.get_type_hints(verb)["experiment"]


def _load(name: str) -> Callable[..., Any]:
    module, function, _ = VERBS[name]
    return vars(importlib.import_module(module))[function]


def _option_names(verb: Callable[..., Any]) -> list[str]:
    return [name for name in verb.__annotations__ if name not in ("experiment", "ablation", "return")]


def _sort(
    line: Line, verb: Callable[..., Any], into: type
) -> tuple[bool, dict[str, str | None], list[tuple[str, str]]]:
    """Sort a line's pairs into: is the configuration to be shown; the verb's own options; overrides of the YAML, whose
    keys are the parameters of ``into``."""
    names = _option_names(verb)
    hints = typing.get_type_hints(verb)
    show = False
    options: dict[str, str | None] = {}
    overrides: list[tuple[str, str]] = []
    words = list(line.words)
    for key, value in line.pairs:
        name = key.replace("-", "_")
        if name == "print_config":
            show = value is None or value.lower() not in ("false", "no", "off")
        elif name in names:
            if hints[name] is bool and value is not None and value.lower() not in BOOLS:
                words.append(value)  # `--dry-run TEXT`: a bool takes no such value, the text stands for itself
                value = None
            options[name] = value
        elif value is None:
            known = [*names, *inspect.signature(into).parameters]
            wrong = "needs a value" if key.partition(".")[0] in known else f"no such option{near(name, known)}"
            raise UserError(f"--{key}: {wrong}")
        else:
            overrides.append((key, value))
    positional = vars(verb).get("positional")
    if words and positional is not None and positional not in options:
        options[positional] = words.pop(0)
    if words:
        raise UserError(f"{words[0]!r}: unexpected; an override is written --key value")
    return show, options, overrides


def _print_verb_help(name: str, key: str, value: str | None) -> None:
    from eagle3_lab.config import signature_of
    from eagle3_lab.config.helping import class_help, verb_help

    verb = signature_of(*VERBS[name][:2])
    into = _into(name, verb)
    if key == "help":
        usage = FOLDER_USAGE if name in OF_ABLATIONS else USAGE
        print(verb_help(verb, into, usage=usage.format(verb=name)), end="")
    else:
        print(class_help(into, key=key.removesuffix(".help"), name=value), end="")


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, (_, _, text) in VERBS.items())
    usage = USAGE.format(verb="VERB")
    return f"usage: {usage}\n\n{verbs}\n\npython -m eagle3_lab VERB --help shows a verb's options and the YAML's keys."


if __name__ == "__main__":
    sys.exit(main())
