"""Which key each option of an experiment belongs to: the one place where this is decided (`keys` applies it).

A key is the hash under which a result is kept and found again:

    training    a trained head                  evaluation  a closing table, and answers of an evaluation
    answers     text that the target wrote      features    a store of the target's hidden states
    documents   encoded conversations           validation  a training key, if `trainer.callbacks` is not empty
    cell        a cell of an ablation, with the keys `training`, `answers` and `documents`

An option of no key decides no result: it may change at any time, and everything that is there is reused. An option "by
content" counts by what it leads to (a file's bytes, the texts read, a head's weights) and never by how it is written.
"""

from __future__ import annotations

from dataclasses import dataclass

KEYS = ("training", "evaluation", "answers", "features", "documents", "validation", "cell")


@dataclass(frozen=True)
class Decision:
    """Where one option counts: in the keys of ``values`` as it is written, in those of ``contents`` by what it leads
    to, which whoever makes the key adds to it."""

    values: frozenset[str]
    contents: frozenset[str]
    why: str


# Class, its options, their keys ("=" before a key: by content), why. An option with parts below it, such as
# `model.draft`, counts by the class that is named there; the class's own rows decide about the rest.
_ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("Experiment", "name tracking budgets", "", "names, shows or says where runs are kept"),
    ("Experiment", "target", "training evaluation", "the parts below decide; its weights and files count by content"),
    ("Experiment", "data model optimizer trainer features", "training", "the parts below decide"),
    ("Experiment", "answers prepare", "answers", "makes text, which counts by content in documents"),
    ("Experiment", "evaluate", "evaluation documents", "the parts below decide"),
    ("Experiment", "engine", "", "what a serving engine measures is measured anew each time"),
    ("Experiment", "judged_depth", "evaluation validation cell", "how deep the hit table looks; decides no weight"),
    ("Experiment", "seed", "training evaluation", "the first weights, the noise, the bootstrap's draws"),
    ("TargetChoice", "model", "=training =evaluation =answers =features =documents", "weights, settings, tokenizer"),
    ("TargetChoice", "dtype", "training evaluation answers features", "what states and logits are rounded to"),
    ("TargetChoice", "attention device device_map pack capture", "evaluation", "seconds; results but for rounding"),
    ("TargetChoice", "wheel probe", "", "the wheel is checked by its hash; a probe compares and changes nothing"),
    ("TargetChoice", "thinking chat_template", "=training =evaluation =answers =documents", "the template's text"),
    ("ConversationData", "path", "=documents =training", "the file's bytes; what of them is trained on"),
    ("ConversationData", "max_length over_length held_out limit", "documents =training", "which tokens are trained on"),
    ("ConversationData", "row_length rows_per_batch packed seed", "training", "what an optimizer step holds"),
    ("ConversationData", "share", "=training", "which conversations train; not which are encoded or kept"),
    (
        "Model",
        "features draft unroll losses step_decay draft_vocab mask edge oov reduction noise",
        "training",
        "trains",
    ),
    ("Model", "start public", "=training", "the bytes of the head that training begins from"),
    ("Model", "budget_mib", "", "bounds memory: the same sums in other portions"),
    ("Model", "compile", "", "the same products and sums, made faster"),
    ("FusedFeature", "layers width normed", "training", "what the draft reads"),
    ("FirstLayers", "layers train_embedding", "training", "the draft's shape and what of it is trained"),
    ("Medusa", "heads num_layers head", "training", "the draft's shape and its first weights"),
    ("Hydra", "heads num_layers prefix head rope_base", "training", "the draft's shape and its first weights"),
    ("Eagle1", "num_layers bias intermediate heads kv_heads head_dim rope_base", "training", "the draft's shape"),
    ("Eagle3", "num_layers intermediate heads kv_heads head_dim rope_base rms_eps", "training", "the draft's shape"),
    ("Eagle3", "head embedding feedback", "training", "its first weights, and what a step feeds back"),
    ("Unroll", "depth detach", "training", "which steps are trained, and through which gradients flow"),
    ("Unroll", "attention", "training", "a published masking is another function"),
    ("NextToken", "reach", "validation", "how deep the hit table looks; judged_depth decides in the closing one"),
    ("Cached", "cache offset view", "training", "decoding's own keys; no training names them"),
    ("KVCache", "num_layers batch capacity device recorded", "training", "decoding's own keys; no training names them"),
    *((name, "weight", "training", "a term of the loss") for name in ("SoftCE", "KL", "ReverseKL", "TotalVariation")),
    *((name, "weight", "training", "a term of the loss") for name in ("HardCE", "TokenCE", "SmoothL1")),
    *((name, "weight", "training", "a term of the loss") for name in ("LogAcceptance", "LogMeanAcceptance")),
    ("TopKCE", "weight k", "training", "a term of the loss"),
    ("KLToAcceptance", "weight rate", "training", "a term of the loss"),
    ("KLToMeanAcceptance", "weight rate", "training", "a term of the loss"),
    ("UniformNoise", "width reference", "training", "what disturbs the features"),
    ("Optimization", "lr betas weight_decay warmup decay final", "training", "every step of the optimizer"),
    ("Training", "products precision", "training", "the number format of products"),
    ("Training", "max_steps max_epochs min_steps min_epochs", "training", "the schedule and its last step"),
    ("Training", "limit_train_batches overfit_batches reload_dataloaders_every_n_epochs", "training", "which rows"),
    ("Training", "accumulate_grad_batches devices num_nodes strategy", "training", "how many rows a step adds up"),
    ("Training", "use_distributed_sampler sync_batchnorm", "training", "what each process sees"),
    ("Training", "gradient_clip_val gradient_clip_algorithm", "training", "every step of the optimizer"),
    ("Training", "callbacks", "training", "a callback may stop a training, or change it"),
    (
        "Training",
        "limit_val_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps",
        "validation",
        "when val/ is read",
    ),
    ("Training", "save_every_minutes", "", "when checkpoints are written"),
    ("Training", "log_every_n_steps enable_progress_bar enable_model_summary profiler", "", "shows"),
    ("Training", "enable_autolog_hparams model_registry barebones detect_anomaly", "", "shows, or stops with an error"),
    ("Training", "accelerator deterministic benchmark inference_mode", "", "the same results but for rounding"),
    ("Training", "limit_test_batches limit_predict_batches", "", "nothing is tested or predicted by the trainer"),
    ("Training", "fast_dev_run max_time", "", "refused"),
    ("Sharded", "process_group_backend timeout", "", "how processes exchange what they add up"),
    ("Answers", "prompts", "=answers", "the file's bytes"),
    ("Answers", "limit temperature max_new_tokens seed", "answers", "the text"),
    ("Answers", "rows", "answers", "last bits of logits, which may turn a token; answers are promised to the byte"),
    ("Features", "dtype", "training features", "what the states that training reads are rounded to"),
    ("Features", "layers", "features", "what the store holds beyond what is read"),
    ("Features", "folder threads", "", "where the store lies, and how it is read"),
    ("Preparation", "prompts sampling server", "answers", "the parts below decide"),
    ("Preparation", "regenerate held_out dtype limit", "answers", "the text"),
    ("Preparation", "rows batch_tokens", "answers", "last bits of logits, which may turn a token, as answers.rows"),
    ("Preparation", "avoid", "=answers", "the prompts that must not be among the answers"),
    ("Mixture", "parts total seed", "answers", "which conversations, in which order"),
    ("Share", "prompts weight", "answers", "which conversations"),
    ("HubPrompts", "name", "=answers", "a folder's bytes; a set of the hub by its name"),
    ("HubPrompts", "config split revision fields source limit", "answers", "which conversations, and their ids"),
    ("HubPrompts", "licence", "", "stands in manifest and card, which are renewed without answering anew"),
    ("Fields", "messages question answer system id before", "answers", "which keys become turns"),
    ("PromptFiles", "path", "=answers", "the files' bytes"),
    ("PromptFiles", "fields source limit", "answers", "which conversations, and whose"),
    ("PromptFiles", "licence", "", "stands in manifest and card, which are renewed without answering anew"),
    ("SelfWritten", "count temperature top_p max_tokens min_words max_words", "answers", "which turns"),
    ("SelfWritten", "rows attempts seed", "answers", "which turns: batches draw from seeds of their own"),
    ("SelfWritten", "licence", "", "stands in manifest and card, which are renewed without answering anew"),
    ("Sampling", "temperature top_p greedy_share max_new_tokens seed", "answers", "the text"),
    ("Server", "url model", "answers", "who answers"),
    ("Server", "concurrency retries timeout_s key_file remote", "", "how requests are sent"),
    ("Task", "name", "evaluation =documents", "the column's name"),
    ("Task", "path limit", "=evaluation =documents", "the prompts' texts, which also never train"),
    ("Evaluation", "tasks", "evaluation documents", "the parts below decide"),
    ("Evaluation", "methods max_new_tokens laws other_dtype seed", "evaluation", "how the tasks are answered"),
    ("HeadTree", "grow verifier law replacement", "evaluation", "the method"),
    ("HeadTree", "head", "=evaluation", "the head's bytes"),
    ("StaticTree", "choices", "evaluation", "the method"),
    ("Chain", "length", "evaluation", "the method"),
    ("DynamicTree", "levels width budget", "evaluation", "the method"),
    ("AutoTree", "measured", "=evaluation", "the file's bytes: they say which tree is grown"),
    ("DrawnTree", "shape law vocab replacement", "evaluation", "the method"),
    ("SamplingLaw", "temperature top_k top_p min_p repetition_penalty", "evaluation", "the distribution"),
    ("TypicalVerifier", "epsilon alpha", "evaluation", "what is accepted"),
    ("PromptLookup", "max_ngram length full", "evaluation", "the method"),
    ("Lookahead", "window ngram guesses follows", "evaluation", "the method"),
    ("DraftLM", "target", "evaluation", "the parts below decide; its files count by content"),
    ("DraftLM", "length adaptive max_length law", "evaluation", "the method"),
    ("DraftLM", "head", "=evaluation", "the head's bytes"),
    ("VLLM", "python dtype eager context cache_gib startup_s batch_sizes drafts", "", "measured anew each time"),
    ("Addresses", "plain speculating remote batch_sizes drafts", "", "measured anew each time"),
    ("Tracking", "folder experiment run_name", "", "where runs are kept and what they are called"),
)


def _decisions() -> dict[str, dict[str, Decision]]:
    found: dict[str, dict[str, Decision]] = {}
    for name, options, keys, why in _ROWS:
        values = frozenset(key for key in keys.split() if not key.startswith("="))
        contents = frozenset(key.removeprefix("=") for key in keys.split() if key.startswith("="))
        assert values | contents <= {*KEYS}, (name, keys)
        for option in options.split():
            assert option not in found.setdefault(name, {}), (name, option)
            found[name][option] = Decision(values, contents, why)
    return found


OPTIONS = _decisions()
"""By class and option."""


def markdown() -> str:
    """Return the table of docs/keys.md: a line for each class and each group of its options."""
    lines = ["| class | options | key | why |", "| --- | --- | --- | --- |"]
    for name, options, keys, why in _ROWS:
        written = ", ".join(f"{key[1:]} (by content)" if key.startswith("=") else key for key in keys.split())
        lines.append(f"| {name} | {', '.join(options.split())} | {written or 'none'} | {why} |")
    return "\n".join(lines) + "\n"
