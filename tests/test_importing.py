"""What a YAML can have imported: classes of the slot's packages and of the user's own modules, and nothing called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eagle3_lab.config import ConfigError, build, check, compose
from eagle3_lab.experiment import Experiment
from eagle3_lab.training.trainer import Training

YAML = """\
name: x
target: {model: nowhere}
trainer:
  max_steps: 3
  callbacks: [CALLBACK]
"""
OWN = """\
from lightning.pytorch.callbacks import Callback

class Own(Callback):
    def __init__(self, note: str = ""): ...

instance = Own()

def make() -> Own:
    return Own()
"""
IMPORTED = "is not imported; name a class of eagle3_lab, lightning or of a module of your own"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, first on the path of modules, with a module of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_callbacks.py").write_text(OWN)
    return tmp_path


def training(folder: Path, callback: str, *overrides: tuple[str, str]) -> Training | None:
    (folder / "x.yaml").write_text(YAML.replace("CALLBACK", callback))
    return build(check(compose(folder / "x.yaml", overrides), Experiment)).trainer


FUNCTION = "a function or a class cannot be given in a YAML, got"


@pytest.mark.parametrize(
    ("callback", "line"),
    [
        ("{class_path: LambdaCallback, init_args: {setup: os.system}}", f"setup: {FUNCTION} 'os.system'; leave"),
        ("{class_path: LambdaCallback, init_args: {setup: {class_path: os.system}}}", f"setup: {FUNCTION} {{'class_pa"),
        ("{class_path: LambdaCallback, init_args: {setup: own_callbacks.make}}", f"setup: {FUNCTION} 'own_call"),
        ("{class_path: ModelPruning, init_args: {pruning_fn: torch.hub.load}}", f"pruning_fn: {FUNCTION} 'torch.hub."),
        ("{class_path: LambdaCallback, dict_kwargs: {setup: os.system}}", "dict_kwargs: unknown key beside class_path"),
        ("os.system", f"callbacks.0: 'os.system' {IMPORTED}"),
        ("antigravity.fly_antigravity", f"callbacks.0: 'antigravity.fly_antigravity' {IMPORTED}"),
        ("{class_path: this.s}", f"callbacks.0: 'this.s' {IMPORTED}"),
        ("pyarrow.lib.Array", f"callbacks.0: 'pyarrow.lib.Array' {IMPORTED}"),
        ("own_callbacks.make", "callbacks.0: 'own_callbacks.make' is no class but a function; legal: "),
        ("own_callbacks.instance", "callbacks.0: 'own_callbacks.instance' is no class but a Own"),
        ("lightning.pytorch.Trainer", "callbacks.0: 'lightning.pytorch.Trainer' is no Callback"),
    ],
)
def test_only_classes_of_the_slot_with_plain_values_are_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, callback: str, line: str
) -> None:
    monkeypatch.setattr("os.system", lambda *_: pytest.fail("was called"))
    before = {*sys.modules}  # other tests of this process may have imported pyarrow
    with pytest.raises(ConfigError) as caught:
        training(folder, callback)
    assert str(caught.value).startswith("x.yaml:5: trainer.callbacks.0") and line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not {"antigravity", "this", "pyarrow"} & (sys.modules.keys() - before)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("profiler", "{class_path: this.s}", f"trainer.profiler: 'this.s' {IMPORTED}"),
        ("strategy", "{class_path: this.s}", f"trainer.strategy: 'this.s' {IMPORTED}"),
        ("accelerator", "{class_path: this.s}", f"trainer.accelerator: 'this.s' {IMPORTED}"),
        ("strategy.activation_checkpointing", "[this.s]", f"trainer.strategy.activation_checkpointing.0: {FUNCTION}"),
        ("strategy", "DDPStrategy", "is configured"),
        ("profiler", "{class_path: PyTorchProfiler}", "PyTorchProfiler cannot be configured: With fail_untyped"),
        ("logger", "{class_path: CSVLogger}", "trainer.logger: unknown key"),
        ("plugins", "[this.s]", "trainer.plugins: unknown key"),
        ("default_root_dir", "x", "trainer.default_root_dir: unknown key"),
    ],
)
def test_the_trainers_own_options_take_no_other_code(folder: Path, key: str, value: str, line: str) -> None:
    overrides = [("trainer.strategy", "FSDPStrategy")] if key.startswith("strategy.") else []
    if line == "is configured":  # a text where Lightning takes a name
        assert training(folder, "LearningRateMonitor", (f"trainer.{key}", value)) is not None
        return
    with pytest.raises(ConfigError) as caught:
        training(folder, "LearningRateMonitor", *overrides, (f"trainer.{key}", value))
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["profiler", "strategy", "accelerator", "precision", "devices", "val_check_interval"])
def test_a_text_that_could_name_a_module_imports_none(folder: Path, key: str) -> None:
    training(folder, "LearningRateMonitor", (f"trainer.{key}", "this.s"))
    assert "this" not in sys.modules


def test_classes_of_the_slot_are_taken_by_name_by_path_and_from_the_users_modules(folder: Path) -> None:
    for text in ("own_callbacks.Own", "{class_path: own_callbacks.Own, init_args: {note: os.system}}"):
        made = training(folder, text)
        assert made is not None and type(made.callbacks[0]).__name__ == "Own"
    for name in ("LearningRateMonitor", "lightning.pytorch.callbacks.LearningRateMonitor"):
        made = training(folder, name)
        assert made is not None and type(made.callbacks[0]).__name__ == "LearningRateMonitor"


def test_a_default_function_is_written_and_read_back(folder: Path) -> None:
    (folder / "x.yaml").write_text(YAML.replace("CALLBACK", "BackboneFinetuning"))
    text = check(compose(folder / "x.yaml"), Experiment).yaml
    assert "lambda_func: lightning.pytorch.callbacks.finetuning.multiplicative" in text
    (folder / "x.yaml").write_text(text)
    config = check(compose(folder / "x.yaml"), Experiment)
    assert config.yaml == text
    assert build(config).trainer is not None
