"""Configuration: an experiment's YAML becomes objects, and a mistake in it becomes one line.

OmegaConf reads, composes and resolves; jsonargparse checks and builds, with signatures as the schema. In order:

    reading     the file, and the files it names (any text that ends in `.yaml`)
    editing     an ablation's overlay; dotted overrides
    composing   `${...}` resolved once, `let:` dropped                           -> `Composed`, a plain dict
    walking     every key, class and value beside the signatures
    checking    jsonargparse's verdict, every default filled in                  -> `Config`
    building    seed, then the parts                                             -> the experiment
    writing     a `Config` as text that reads back as itself

In one call (`eagle3_lab.load` is this one for experiments):

    experiment = load("experiments/eagle3.yaml", "model.unroll.depth=3", into=Experiment)

and step by step, for a runner of many cells:

    composed = compose("experiments/eagle3.yaml", [("model.unroll.depth", "3")], patches=[cell])
    config = check(composed, Experiment)
    experiment = build(config)

What is imported from here is stable; the modules below it are not.
"""

from eagle3_lab.config.building import build, load, seed_everything
from eagle3_lab.config.checking import Config, check, check_options
from eagle3_lab.config.composing import Composed, compose, compose_document, parse_overrides
from eagle3_lab.config.editing import overlay
from eagle3_lab.config.reading import Document, find_experiment, read, shipped_experiments
from eagle3_lab.config.signature import signature_of
from eagle3_lab.config.writing import plain, to_yaml
from eagle3_lab.errors import ConfigError

__all__ = [
    "Composed",
    "Config",
    "ConfigError",
    "Document",
    "build",
    "check",
    "check_options",
    "compose",
    "compose_document",
    "find_experiment",
    "load",
    "overlay",
    "parse_overrides",
    "plain",
    "read",
    "seed_everything",
    "shipped_experiments",
    "signature_of",
    "to_yaml",
]
