"""Tokenizers of targets: which ids stand for a text, and texts that come back whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eagle3_lab.errors import UserError
from eagle3_lab.target_model.loading import TargetChoice
from eagle3_lab.target_model.tokenizer import real_ids, require_round_trip

SPACE = "\u2581"


def byte_level(special: dict[str, int] | None = None) -> PreTrainedTokenizerFast:
    """256 bytes, and special tokens at ids of their own."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=letters | (special or {}), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in special or {}])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def sentence_piece(unigram: bool = False, fallback: bool = True) -> PreTrainedTokenizerFast:
    """As SentencePiece's files read: spaces are a letter, what is unknown becomes bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256 if fallback else 0)), SPACE]
    pieces += [*"abcdefghijklmnopqrstuvwxyz", ",", "?"]
    if unigram:
        inner = Tokenizer(models.Unigram([(p, -1.0) for p in pieces], unk_id=0, byte_fallback=fallback))
    else:
        vocab = {piece: i for i, piece in enumerate(pieces)}
        inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def word_pieces() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz,?", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    inner = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


def whole_words() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


# ------------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("special", "rows", "ends", "expected"),
    [
        ({}, 300, (), 256),
        ({"<a>": 257, "<b>": 260}, 300, (), 261),
        ({"<a>": 257, "<b>": 260}, 259, (), 259),  # the head's rows end before: nothing behind them is ever written
        ({"<a>": 299}, 300, (), 300),
        ({"<a>": 256}, 300, (270,), 271),  # the model ends with an id that its tokenizer does not name
        ({"<a>": 256}, 300, (3,), 257),
    ],
)
def test_the_highest_id_counts_not_how_many_there_are(
    special: dict[str, int], rows: int, ends: tuple[int, ...], expected: int
) -> None:
    assert real_ids(byte_level(special), rows, ends) == expected


def with_holes(folder: Path) -> Path:
    """A target whose 259 tokens end at id 260."""
    tiny.write_target(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    tokenizer = byte_level({"<|im_start|>": 256, "<|extra|>": 257, "<|im_end|>": 260})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", tiny.CHATML
    tokenizer.save_pretrained(folder)
    return folder


def test_a_target_whose_ids_have_holes_is_loaded_with_all_of_them(tmp_path: Path) -> None:
    target = TargetChoice(str(with_holes(tmp_path / "target"))).load()
    assert len(target.tokenizer) == 259
    assert target.spec.real_vocab == 261
    assert 260 in target.spec.end_tokens


def test_a_prompt_of_ids_that_the_model_has_no_rows_for_is_refused_and_unused_ones_are_not(tmp_path: Path) -> None:
    unused = tiny.write_target(tmp_path / "unused", vocab=258)  # <|extra|> is id 258, and no prompt holds it
    assert TargetChoice(str(unused)).load().spec.real_vocab == 258
    used = tiny.write_target(tmp_path / "used", vocab=258, template=tiny.CHATML + "<|extra|>")
    with pytest.raises(UserError, match=r"writes '<\|extra\|>' as id 258, and the model's embedding has 258 rows"):
        TargetChoice(str(used)).load()


# ------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(),
        sentence_piece(),
        sentence_piece(fallback=False),
        sentence_piece(unigram=True),
        sentence_piece(unigram=True, fallback=False),
        word_pieces(),
        whole_words(),
    ],
    ids=["bytes", "sentencepiece", "no fallback", "unigram", "unigram, no fallback", "word pieces", "words"],
)
def test_tokenizers_that_give_texts_back_or_mark_what_they_do_not_know_are_served(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    require_round_trip(tokenizer, "x")


def without_spaces() -> PreTrainedTokenizerFast:
    """What a class that marks spaces by a letter makes of a byte-level file, which has no such letter."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never")
    return tokenizer


def without_accents() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u4f60", "")
    return tokenizer


def undecoded() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize("tokenizer", [without_spaces(), without_accents(), undecoded()], ids=["spaces", "han", "raw"])
def test_a_tokenizer_that_loses_text_is_refused_in_one_line(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"the tokenizer of 'x', a \w+, reads .* back as .*; name the class") as refused:
        require_round_trip(tokenizer, "x")
    assert "\n" not in str(refused.value)


def test_a_byte_level_file_under_a_class_for_sentence_pieces_is_read_right_or_refused_at_load(tmp_path: Path) -> None:
    """Which of the two depends on the version of transformers; silently losing spaces is neither."""
    for number, (kind, name) in enumerate(
        (("mistral", "LlamaTokenizer"), ("mistral", "LlamaTokenizerFast"), ("llama", "LlamaTokenizerFast"))
    ):
        folder = tiny.write_target(tmp_path / str(number))
        for file, change in (
            ("config.json", {"model_type": kind}),
            ("tokenizer_config.json", {"tokenizer_class": name}),
        ):
            (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
        try:
            tokenizer = TargetChoice(str(folder)).tokenizer()
        except UserError as error:
            assert "\n" not in str(error)
            assert "reads" in str(error) and "back as" in str(error)
        else:
            ids = tokenizer("hello brave new world", add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == "hello brave new world"
