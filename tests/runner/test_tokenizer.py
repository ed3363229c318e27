"""Tokenizers of every kind of folder: the ids that the files mean, or a refusal that says what is missing."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig

from batchserve.config import EngineConfig
from batchserve.errors import ConfigError, UnsupportedModelError
from batchserve.runner.tokenizer import PROBES, check_vocabulary, load_tokenizer

pytestmark = pytest.mark.faults
TEXT = ["Hello world, it's 12345 o'clock in the café.", "def f(x):\n\treturn  x ** 2  # a comment", *PROBES]
BPE = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA = {**BPE, "byte_fallback": True, "split_digits": True, "allow_whitespace_only_pieces": True}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma": {**LLAMA, "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
    "mistral, control": {**LLAMA, "control_symbols": ["[INST]", "[/INST]"]},
    "own symbols": {**LLAMA, "user_defined_symbols": ["<tool>", "\n\n"]},
    "own symbols, unigram": {"model_type": "unigram", "user_defined_symbols": ["<tool>", "->"]},
    "no bytes": BPE,
    "unigram": {"model_type": "unigram"},
    "unigram, bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nfkc"},
}
CONFIGS: list[dict[str, Any] | None] = [
    None,
    {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True},
    {"tokenizer_class": "NotThereTokenizer", "bos_token": "<s>"},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sentencepiece")

    def train(kind: str) -> Path:
        file = folder / f"{kind}.model"
        if not file.exists():
            text = iter(TEXT * 20)
            options = {"vocab_size": 420, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
            with file.open("wb") as writer:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=text, model_writer=writer, **options, **KINDS[kind]
                )
        return file

    return train


def make_folder(folder: Path, settings: dict[str, Any] | None = None, model_type: str = "llama") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(AutoConfig.for_model(model_type).to_dict()))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def load(folder: Path) -> Any:
    return load_tokenizer(str(folder), EngineConfig(model=str(folder)))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_model_alone_gives_sentencepieces_ids_and_a_bos(
    trained: Callable[[str], Path], tmp_path: Path, kind: str, settings: dict[str, Any] | None, model_type: str
) -> None:
    """Whatever class the folder or the model's type suggests to transformers."""
    folder = make_folder(tmp_path / "model", settings, model_type)
    shutil.copy(trained(kind), folder / "tokenizer.model")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = load(folder)
    for text in (*TEXT, "  two", "end  ", "\n x", "<tool>a <tool> b->\n\n\nc", " <tool>"):
        assert tokenizer(text)["input_ids"] == [reference.bos_id(), *reference.encode(text)]
        if kind in ("llama", "gemma"):
            assert tokenizer.decode(reference.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (reference.eos_id(), reference.bos_id())


def test_what_stands_beside_a_tokenizer_model_counts(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """No BOS where that is said; added tokens under their ids; the chat template."""
    added = {"content": "<|im_end|>", "special": True}
    file = trained("llama")
    size = sentencepiece.SentencePieceProcessor(model_file=str(file)).get_piece_size()
    settings = {"add_bos_token": False, "added_tokens_decoder": {str(size): added}, "eos_token": "<|im_end|>"}
    folder = make_folder(tmp_path / "model", settings)
    shutil.copy(file, folder / "tokenizer.model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load(folder)
    ids = tokenizer("Hello<|im_end|>")["input_ids"]
    assert (ids[0] != tokenizer.bos_token_id, ids[-1], tokenizer.eos_token_id) == (True, size, size)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(size + 5): added}}))
    with pytest.raises(ConfigError, match=f"'<|im_end|>' has id {size} after conversion, must be {size + 5}"):
        load(folder)


def test_without_sentencepiece_it_is_said_what_to_install(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "model")
    shutil.copy(trained("llama"), folder / "tokenizer.model")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=r"needs sentencepiece.*pip install 'batchserve\[tokenizers\]'"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.model", b"version https://git-lfs", "is neither a SentencePiece model nor a tiktoken vocabulary"),
        ("tokenizer.model", b"", "is neither a SentencePiece model nor a tiktoken vocabulary"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "is a tiktoken vocabulary.*put the model's tokenizer.json beside it"),
        ("tokenizer.json", b"{", "its tokenizer cannot be loaded: "),
        ("tokenizer_config.json", b"[]", "must hold an object, not list"),
        ("tokenizer_config.json", b'{"tokenizer_class": "LlamaTokenizer"}', "its files are not complete"),
        ("vocab.json", b'{"a": 0}', "cannot be made from vocab.json alone"),
    ],
)
def test_files_that_make_no_tokenizer_are_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def byte_level(normal: bool = True) -> Tokenizer:
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({text: i for i, text in enumerate([*alphabet, "he", "ll"])}, [("h", "e"), ("l", "l")])
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel() if normal else decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "mistral", "gemma2"])
@pytest.mark.parametrize("name", [None, "LlamaTokenizer", "GPT2Tokenizer", "T5Tokenizer", "NotThereTokenizer"])
def test_a_tokenizer_json_means_what_it_says_whatever_class_is_named(
    tmp_path: Path, model_type: str, name: str | None
) -> None:
    folder = make_folder(tmp_path / "model", {} if name is None else {"tokenizer_class": name}, model_type)
    written = byte_level()
    written.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    for text in PROBES:
        assert tokenizer(text)["input_ids"] == written.encode(text).ids
        assert tokenizer.decode(written.encode(text).ids) == text


def test_a_tokenizer_json_beside_another_models_sentencepiece_model_is_named(
    trained: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path / "model")
    shutil.copy(trained("llama"), folder / "tokenizer.model")
    load(folder).backend_tokenizer.save(str(folder / "tokenizer.json"))
    load(folder)
    assert not caplog.records
    byte_level().save(str(folder / "tokenizer.json"))
    load(folder)
    assert "tokenizer.model: gives other tokens for" in caplog.text


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("has_bos", [True, False])
def test_a_bos_that_the_configuration_and_the_file_disagree_about_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: bool, has_bos: bool
) -> None:
    """The file counts, as in transformers."""
    folder = make_folder(tmp_path / "model", {"bos_token": "<s>", "add_bos_token": asked})
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>"])
    if has_bos:
        special = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos = [tokenizer.token_to_id("<s>")] if has_bos else []
    assert load(folder)("he")["input_ids"] == [*bos, tokenizer.token_to_id("he")]
    assert ("add_bos_token" in caplog.text) == (asked != has_bos)


def test_a_tiktoken_vocabulary_of_llama_3_has_its_special_tokens(tmp_path: Path) -> None:
    added = {
        str(258 + i): {"content": text, "special": True} for i, text in enumerate(("<|begin_of_text|>", "<|eot_id|>"))
    }
    settings = {"added_tokens_decoder": added, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    folder = make_folder(tmp_path / "model", settings)
    tokens = [*(bytes([i]) for i in range(256)), b"he", b"ll"]
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("\n".join(lines))
    tokenizer = load(folder)
    assert tokenizer("hello<|eot_id|>")["input_ids"] == [258, 256, 257, ord("o"), 259]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (258, 259)


def test_a_text_that_does_not_come_back_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    byte_level(normal=False).save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"its tokenizer \(\w+\) turns .* into .*: its files are not complete"):
        load(folder)


def test_a_small_vocabulary_is_no_fault(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load(folder)("hello you")["input_ids"] == [1, 0]


@pytest.mark.parametrize("kind", ["WordPiece", "CTC"])
def test_tokenizers_whose_text_is_lost_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    folder = make_folder(tmp_path / "model")
    vocab = {"[UNK]": 0, "hello": 1, "##s": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.CTC()
    if kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match=f"its tokenizer is of type {kind}, .*spaces are lost"):
        load(folder)


def tekken() -> dict[str, Any]:
    tokens = [*(bytes([i]) for i in range(256)), b" w", b"or", b"ld", b"He", b"ll"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return {
        "config": {"pattern": pattern, "default_vocab_size": 267, "default_num_special_tokens": 6, "version": "v7"},
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate(tokens)],
        "special_tokens": [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(special)],
    }


@pytest.mark.parametrize("model_type", ["mistral", "llama"])
def test_a_tekken_file_alone_has_its_bos_and_eos(tmp_path: Path, model_type: str) -> None:
    folder = make_folder(tmp_path / "model", model_type=model_type)
    (folder / "tekken.json").write_text(json.dumps(tekken()))
    tokenizer = load(folder)
    ids = tokenizer("Hello")["input_ids"]
    assert ids == [1, 6 + 259, 6 + 260, 6 + ord("o")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert load(folder)("Hello")["input_ids"] == ids[1:]


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    byte_level().save(str(folder / "tokenizer.json"))
    tokenizer, config = load(folder), EngineConfig(model=str(folder))
    check_vocabulary(tokenizer, 258, config)
    with pytest.raises(
        ConfigError, match=r"its tokenizer gives token id \d+, must be in 0..127: it is another model's"
    ):
        check_vocabulary(tokenizer, 128, config)


def test_merges_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    pairs = [(a, b) for a in "aeiou" for b in "lmnrst"]
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    lines = [f"{a} {b}" for a, b in pairs]
    folder = make_folder(tmp_path / "gpt2", {"tokenizer_class": "GPT2Tokenizer"}, "gpt2")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
    assert load(folder)("Hello world")["input_ids"]
    for kept in (len(lines) // 2, 0):
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines[:kept]]))
        with pytest.raises(ConfigError, match=r"merges\.txt makes \d+ of the \d+ tokens"):
            load(folder)


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "empty")
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="makes no tokens of any text"):
        load(folder)
