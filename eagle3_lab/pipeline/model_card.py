"""The model card of an exported head: what it is for, what it was trained on, what was measured, how it is served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from eagle3_lab.formats.description import HeadDescription
from eagle3_lab.formats.writing import Format

NOT_MEASURED = "Not measured by the run that trained it."
METHODS = {"EAGLE-3": "eagle3", "EAGLE": "eagle", "Medusa": "medusa"}


def model_card(
    head: HeadDescription,
    to: Format,
    target: str,
    folder: Path,
    manifest: Mapping[str, Any],
    config: str,
    table: Mapping[str, Any],
) -> str:
    """Return the card as the hub reads it: a YAML header, then Markdown.

    Args:
        head: what is exported.
        to: the format.
        target: name or hub id of the target.
        folder: where the head is written; its name stands in the commands.
        manifest: of the training text, as `ConversationData.manifest`.
        config: the experiment as YAML.
        table: the closing table as JSON; empty where none was measured.
    """
    method = METHODS[head.kind]
    header = {
        "base_model": target,
        "pipeline_tag": "text-generation",
        "library_name": "speculators" if to == "speculators" else "vllm",
        "tags": ["speculative-decoding", "draft-model", method],
    }
    source = Path(str(manifest["path"])).name
    licences = manifest["licences"] or {source: "not recorded"}
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
        f"# {head.kind} draft head for {target}\n",
        f"It drafts tokens for `{target}`, which judges them: greedy text stays the target's own. Format: `{to}`.\n",
        f"## Measured\n\n{_measured(table)}\n",
        f"## Training text\n\n`{source}`, content hash `{manifest['hash']}`.\n",
        "\n".join(f"- {name}: {licence}" for name, licence in sorted(licences.items())) + "\n",
        "\n".join(f"- {part}: {json.dumps(manifest[part])}" for part in ("train", "held_out")) + "\n",
        f"## Serving\n\n{_serving(head, to, target, folder.name, method)}\n",
        f"## Configuration\n\n```yaml\n{config.rstrip()}\n```\n",
    ]
    return "\n".join(parts)


def _measured(table: Mapping[str, Any]) -> str:
    rows = [row for row in table.get("methods", []) if row["n_alpha"]]
    if not rows:
        return NOT_MEASURED
    lines = [
        "tau: tokens a round, the bonus token counted; n-alpha: share accepted of the drafts judged at depth n.",
        "95 % intervals over prompts.",
        "",
        "| method | task | law | prompts | tau | n-alpha |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        alphas = ", ".join("-" if one["value"] is None else f"{one['value']:.2f}" for one in row["n_alpha"])
        cells = (row["name"], row["task"], row["law"], str(row["prompts"]), _interval(row["tau"]), alphas)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", str(table.get("setting", ""))])


def _interval(value: Mapping[str, float | None]) -> str:
    if value["value"] is None:
        return "-"
    bounds = "" if value["low"] is None or value["high"] is None else f" [{value['low']:.2f}, {value['high']:.2f}]"
    return f"{value['value']:.2f}{bounds}"


def _serving(head: HeadDescription, to: Format, target: str, name: str, method: str) -> str:
    drafts = head.config["num_heads"] if head.kind == "Medusa" else 3
    speculative = json.dumps({"method": method, "model": name, "num_speculative_tokens": drafts})
    vllm = f"python -m vllm.entrypoints.openai.api_server --model {target} --speculative-config '{speculative}'"
    sglang = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path {name} --speculative-num-steps {drafts} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {drafts + 1}"
    )
    if to == "speculators":
        vllm = f"vllm serve {name}"
    commands = {"engines": [vllm, sglang], "vllm": [vllm], "speculators": [vllm], "sglang": [sglang]}.get(to, [])
    if not commands:
        return "In its authors' layout: `eagle3_lab export` writes it for engines, `speculators convert` converts it."
    return "```bash\n" + "\n".join(commands) + "\n```"
