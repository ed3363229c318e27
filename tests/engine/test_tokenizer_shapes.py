"""Tokenizers of the shapes that models come with: streamed text is a whole decode, whatever tokens come."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Split
from transformers import PreTrainedTokenizerFast

from batchserve.engine.detokenizer import IncrementalDetokenizer, decoder_of, special_texts, token_texts

pytestmark = pytest.mark.faults
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's 12345 o'clock.",
    "def read(file):\n\treturn [line.strip() for line in file]\n\n    # 2 + 2 == 4",
    "Ça coûte 42 € dans le café; Größe und Maß. Привет, мир! 你好,世界。こんにちは 안녕 שלום",
    "Hello world, hello there, the world said.  Two spaces,   three spaces.",
] * 4
SPACE = "\u2581"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
SPECIAL = ["<s>", "</s>", "<|im_end|>", "[INST]"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def byte_level(*splits: str, prefix_space: bool = False, normalizer: Any = None, first: Any = None) -> Tokenizer:
    """GPT-2's kind: every byte is a character, split by its own pattern or by others."""
    tokenizer = Tokenizer(models.BPE())
    parts = [Split(Regex(pattern), "isolated") for pattern in splits]
    last = ByteLevel(add_prefix_space=prefix_space, use_regex=not splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*([] if first is None else [first]), *parts, last])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace(
    *,
    scheme: str | None = None,
    normalizer: Any = None,
    decoder: str = "strip",
    split: bool = False,
    has_bytes: bool = True,
) -> Tokenizer:
    """SentencePiece's BPE: a space is part of the word after it; what has no token is bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=has_bytes, fuse_unk=True, unk_token="<unk>"))
    if scheme is not None:
        tokenizer.pre_tokenizer = Metaspace(SPACE, prepend_scheme=scheme, split=split)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    special = ["<unk>", *SPECIAL, *(BYTES if has_bytes else [])]
    latin = [line for line in CORPUS if line.isascii()]  # everything else is bytes
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(latin, trainer)
    return as_sentencepiece(tokenizer, decoder, scheme)


def as_sentencepiece(tokenizer: Tokenizer, decoder: str, scheme: str | None) -> Tokenizer:
    """With a decoder of the kind, and without the trainer's mark on byte tokens: they are not special."""
    if decoder == "metaspace":
        tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme or "always")
    else:
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        strip = [decoders.Strip(" ", 1, 0)] if decoder == "strip" else []
        tokenizer.decoder = decoders.Sequence([*parts, *strip])
    rebuilt = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(tokenizer, part) is not None:
            setattr(rebuilt, part, getattr(tokenizer, part))
    rebuilt.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", *SPECIAL)])
    return rebuilt


def unigram(*, scheme: str = "always", decoder: str = "metaspace", has_bytes: bool = False) -> Tokenizer:
    """T5's and XLM-R's kind."""
    special = ["<unk>", *SPECIAL]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = Metaspace(SPACE, prepend_scheme=scheme, split=True)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if has_bytes:
        scores = [*((text, 0.0) for text in special), *((text, -9.0) for text in BYTES)]
        words = [(text, -float(i)) for i, text in enumerate(tokenizer.get_vocab()) if text not in special]
        tokenizer.model = models.Unigram([*scores, *words], 0, True)
    return as_sentencepiece(tokenizer, decoder, scheme)


def with_added(tokenizer: Tokenizer, **options: bool) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(text, **options) for text in ("<tool>", "  ", "Straße", "😀")])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, **options)])
    return tokenizer


def suffixed() -> Tokenizer:
    """CTRL's and CLIP's kind: a word's last token says that a space comes after it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *SPECIAL], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words(decoder: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    """A word or a character is a token."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def llama2() -> Tokenizer:
    legacy = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return metaspace(normalizer=legacy)


def gemma() -> Tokenizer:
    return metaspace(normalizer=normalizers.Replace(" ", SPACE), decoder="plain")


def digits(*, individual: bool) -> Any:
    return pre_tokenizers.Digits(individual_digits=individual)


SHAPES: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_level,
    "gpt2, prefix space": lambda: byte_level(prefix_space=True),
    "gpt2, pattern": lambda: byte_level(GPT2),
    "gpt-neox, NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "llama3": lambda: byte_level(LLAMA3),
    "qwen2": lambda: byte_level(QWEN2, normalizer=normalizers.NFC()),
    "deepseek": lambda: byte_level(r"\p{N}{1,3}", r"[一-龥ぁ-ヿ]+", r"\s?[\p{L}\p{M}]+|\s+"),
    "tekken": lambda: byte_level(TEKKEN),
    "starcoder, digits": lambda: byte_level(first=digits(individual=True)),
    "falcon, punctuation": lambda: byte_level(first=pre_tokenizers.Punctuation("contiguous")),
    "bloom": lambda: byte_level(r" ?[^(\s|[.,!?…。,])]+"),
    "gpt2, lower case": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "gpt2, added": lambda: with_added(byte_level(), normalized=False),
    "gpt2, added, strips left": lambda: with_added(byte_level(), normalized=True, lstrip=True),
    "qwen2, added, strips right": lambda: with_added(byte_level(QWEN2), normalized=False, rstrip=True),
    "llama2": llama2,
    "llama2, added, normalized": lambda: with_added(llama2(), normalized=True),
    "llama2, first": lambda: metaspace(scheme="first"),
    "mistral, always": lambda: metaspace(scheme="always"),
    "yi, never": lambda: metaspace(scheme="never", decoder="plain"),
    "never, but stripped": lambda: metaspace(scheme="never"),
    "gemma": gemma,
    "gemma, added": lambda: with_added(gemma(), normalized=False),
    "phi3, strips right": lambda: with_added(metaspace(scheme="first"), normalized=False, rstrip=True),
    "single words": lambda: with_added(metaspace(scheme="first"), normalized=False, single_word=True),
    "metaspace, always": lambda: metaspace(scheme="always", decoder="metaspace", split=True, has_bytes=False),
    "metaspace, first": lambda: metaspace(scheme="first", decoder="metaspace", has_bytes=False),
    "metaspace, never": lambda: metaspace(scheme="never", decoder="metaspace", has_bytes=False),
    "t5": unigram,
    "xlm-r, first": lambda: unigram(scheme="first"),
    "unigram, never": lambda: unigram(scheme="never"),
    "unigram, bytes": lambda: unigram(decoder="strip", has_bytes=True),
    "clip, suffix": suffixed,
    "words": words,
    "words, fused": lambda: words(decoders.Fuse()),
    "characters": lambda: words(decoders.Fuse(), Split("", "isolated")),
}


@pytest.fixture(scope="module")
def built() -> dict[str, Tokenizer]:
    return {}


def shape(built: dict[str, Tokenizer], name: str) -> Tokenizer:
    if name not in built:
        built[name] = SHAPES[name]()
    return built[name]


def random_tokens(rng: random.Random, tokenizer: Tokenizer, count: int) -> list[int]:
    """Any tokens. Byte tokens are characters, or stray ones between words: beside those whole ones would be lost."""
    vocab = tokenizer.get_vocab()
    if "<0x00>" not in vocab:
        return [rng.choice(list(vocab.values())) for _ in range(count)]
    plain = [token_id for text, token_id in vocab.items() if text not in BYTES]
    found = [rng.choice(word_ids(tokenizer, plain))]  # the prompt may end with bytes
    while len(found) < count:
        kind = rng.random()
        if kind < 0.3:
            text = "".join(rng.choice("é€😀你\n\tA") for _ in range(rng.randint(1, 3)))
            found += [vocab[f"<0x{byte:02X}>"] for byte in text.encode()]
        elif kind < 0.4:
            found += [vocab[f"<0x{rng.choice((0x80, 0xC0, 0xF0)):02X}>"] for _ in range(rng.randint(1, 4))]
        found.append(rng.choice(word_ids(tokenizer, plain)))
        found += [rng.choice(plain) for _ in range(rng.randint(0, 2))]
    return found


def word_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Tokens with text of their own: special ones leave the bytes on both sides beside each other."""
    special = special_texts(tokenizer)
    return [token_id for token_id in ids if token_id not in special]


def stream(
    tokenizer: Tokenizer,
    prompt: list[int],
    answer: list[int],
    rng: random.Random,
    *,
    skip: bool,
    stop: tuple[str, ...] = (),
) -> str:
    """The answer's text in steps of one to five tokens, the last with or without an end token."""
    decoder = decoder_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    texts = token_texts(decoder, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(decoder, stop, skip, texts, prompt, special_texts(decoder))
    place, text = 0, ""
    has_end_token = rng.random() < 0.5 or not answer
    while place < len(answer):
        step = answer[place : place + rng.randint(1, 5)]
        place += len(step)
        piece = detokenizer.feed(step, is_last=place == len(answer) and not has_end_token)
        text += piece.text
        if piece.stop is not None:
            return text
    return text + (detokenizer.feed([], is_last=True).text if has_end_token else "")


def answer_text(tokenizer: Tokenizer, prompt: list[int], answer: list[int], *, skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip) if prompt else ""
    after = tokenizer.decode([*prompt, *answer], skip_special_tokens=skip)
    assert after.startswith(before)
    return after[len(before) :]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_streamed_text_of_any_tokens_is_a_whole_decode(built: dict[str, Tokenizer], name: str, skip: bool) -> None:
    """With and without a prompt before them, special tokens and torn characters included."""
    tokenizer, rng = shape(built, name), random.Random(name)
    prompts = [[], *(tokenizer.encode(text).ids for text in ("Hello,", "the world said", "é 你好 😀", "a\n"))]
    prompts += [[tokenizer.token_to_id("<s>")], [*prompts[1], tokenizer.token_to_id("</s>")]]
    for _ in range(12):
        prompt, answer = rng.choice(prompts), random_tokens(rng, tokenizer, rng.randint(0, 25))
        expected = answer_text(tokenizer, prompt, answer, skip=skip)
        assert stream(tokenizer, prompt, answer, rng, skip=skip) == expected, (prompt, answer)
        assert stream(tokenizer, prompt, answer, rng, skip=skip, stop=("\0never",)) == expected, (prompt, answer)


@pytest.mark.parametrize("name", SHAPES)
def test_streamed_text_of_any_text_is_a_whole_decode(built: dict[str, Tokenizer], name: str) -> None:
    """Cut anywhere into a prompt and an answer, within a character too: it is then whole in the answer."""
    tokenizer, rng = shape(built, name), random.Random(name)
    for line in (*CORPUS[:4], "naïve 😀👍🏽 family 👨‍👩‍👧 end", "  two  spaces "):
        ids = tokenizer.encode(line).ids
        whole = tokenizer.decode(ids)
        for cut in range(rng.randrange(5), len(ids), 5):
            text = stream(tokenizer, ids[:cut], ids[cut:], rng, skip=True)
            known = (tokenizer.decode(ids[:size]) for size in range(cut, 0, -1))
            before = next((decoded for decoded in known if "\ufffd" not in decoded), "")
            assert before + text == whole, cut


@pytest.mark.parametrize("name", SHAPES)
def test_a_stop_string_of_a_special_token_is_found_though_it_is_skipped(built: dict[str, Tokenizer], name: str) -> None:
    tokenizer, rng = shape(built, name), random.Random(name)
    words, end = tokenizer.encode("the dog").ids, tokenizer.token_to_id("<|im_end|>")
    other = tokenizer.token_to_id("[INST]")
    answer = [*words, other, end, *words]
    shown = answer_text(tokenizer, words, words, skip=True)
    for stop in ("<|im_end|>", "[INST]<|im_end|>", f"{shown[-1]}[INST]"):
        text = stream(tokenizer, words, answer, rng, skip=True, stop=(stop,))
        assert text == (shown[:-1] if stop.startswith(shown[-1]) else shown), stop
    assert stream(tokenizer, words, answer, rng, skip=True, stop=("<|im_end|>never",)) == answer_text(
        tokenizer, words, answer, skip=True
    )
