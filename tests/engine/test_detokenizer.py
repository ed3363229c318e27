"""Tokens to text in pieces: together the same text, characters never torn, stop strings found across any border."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batchserve.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer, TextPiece, decoder_of, token_texts
from batchserve.runner.model_folder import resolve_model
from tests.engine.scripted import Letters
from tests.factories import examples

TEXTS = [
    "Return the next block of the file, or an empty string at the end.",
    "naïve café — “quoted” … ½",
    "family 👨‍👩‍👧‍👦 flags 🇩🇪🇯🇵 skin 👍🏽 end",
    "日本語のテキスト и кириллица עברית العربية",
    "e\u0301 combining \u200b zero width \ufeff mark",
    "def f(x):\n    return {'a': x,\t'b': [1, 2]}\n\n\n",
    "  leading and trailing spaces   ",
    "\ufffd a real replacement character \ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 😀😀😀",  # noqa: RUF001
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("bundled"))


def feed_in_pieces(
    detokenizer: IncrementalDetokenizer, token_ids: list[int], sizes: list[int], *, has_end_token: bool
) -> list[TextPiece]:
    """Pieces of the given sizes in turn, until one is stopped; the last step may bring an end token only."""
    pieces, place, i = [], 0, 0
    while place < len(token_ids):
        step = token_ids[place : place + sizes[i % len(sizes)]]
        place, i = place + len(step), i + 1
        is_last = place == len(token_ids) and not has_end_token
        pieces.append(detokenizer.feed(step, is_last=is_last))
        if pieces[-1].stop is not None:
            return pieces
    if has_end_token or not token_ids:
        pieces.append(detokenizer.feed([], is_last=True))
    return pieces


def joined(pieces: list[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)
stops = st.sampled_from([(), ("\x00never",), ("zzz", "q\u0301")])


@examples(120)
@given(st.data(), sizes, st.booleans(), stops)
def test_pieces_together_are_the_text_of_all_tokens(
    tokenizer: PreTrainedTokenizerBase,
    data: st.DataObject,
    sizes: list[int],
    has_end_token: bool,
    stop: tuple[str, ...],
) -> None:
    """Of real texts, of any text, and of any tokens at all: broken UTF-8 and special tokens in the middle included."""
    kind = data.draw(st.sampled_from(["real", "any text", "any tokens"]))
    if kind == "any tokens":
        token_ids = data.draw(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 4095)), max_size=40))
    else:
        text = data.draw(st.sampled_from(TEXTS) if kind == "real" else st.text(max_size=30))
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for used, skip in itertools.product((tokenizer, decoder_of(tokenizer)), (True, False)):
        detokenizer = IncrementalDetokenizer(used, stop, skip, token_texts(used, skip_special_tokens=skip))
        pieces = feed_in_pieces(detokenizer, token_ids, sizes, has_end_token=has_end_token)
        assert joined(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert [token for piece in pieces for token in piece.token_ids] == token_ids


@examples(60)
@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 4095)), max_size=40), sizes, stops, st.booleans())
def test_offsets_are_where_the_texts_of_tokens_begin(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], sizes: list[int], stop: tuple[str, ...], skip: bool
) -> None:
    """However tokens come in steps; of a part of a character, it is where that begins."""
    used, found = decoder_of(tokenizer), []
    for each in (sizes, [1], [100]):
        texts = token_texts(used, skip_special_tokens=skip)
        detokenizer = IncrementalDetokenizer(used, stop, skip, texts, gives_offsets=True, num_chars=7)
        pieces = feed_in_pieces(detokenizer, token_ids, each, has_end_token=False)
        assert all(piece.offsets is not None and len(piece.offsets) == len(piece.token_ids) for piece in pieces)
        found.append([offset - 7 for piece in pieces for offset in piece.offsets or ()])
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert found[0] == found[1] == found[2]
    for place, offset in enumerate(found[0]):
        before = tokenizer.decode(token_ids[:place], skip_special_tokens=skip)
        assert whole[:offset] == before[:offset]
        assert len(before) - 4 <= offset <= len(before)  # but for bytes of a character that is not complete
        assert set(before[offset:]) <= {REPLACEMENT}


class Counting:
    """A tokenizer that counts the tokens it is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self.count = tokenizer, 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.count += len(token_ids)
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerBase:
    """As SentencePiece's: a space is part of a word, the first one is dropped, bytes make a character or nothing."""
    words = ["<s>", "\u2581", "\u2581the", "a", "é", "\ufffd", *(f"<0x{i:02X}>" for i in range(256))]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    rust = Tokenizer(model)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    rust.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=rust, clean_up_tokenization_spaces=False)


def test_only_tokens_that_are_just_bytes_are_decoded_without_those_before(
    tokenizer: PreTrainedTokenizerBase, byte_fallback: PreTrainedTokenizerBase
) -> None:
    assert token_texts(decoder_of(tokenizer), skip_special_tokens=True) is not None
    for other in (None, Letters(), tokenizer, decoder_of(byte_fallback)):
        assert token_texts(other, skip_special_tokens=True) is None


def fallback_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """A token for each character that has one, bytes of the others."""
    known = tokenizer.get_vocab()
    return [
        token
        for character in text.replace(" ", "\u2581")
        for token in ([known[character]] if character in known else byte_ids(tokenizer, character.encode()))
    ]


def byte_ids(tokenizer: PreTrainedTokenizerBase, some: bytes) -> list[int]:
    return [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in some]


some_bytes = st.one_of(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xAC, 0x41, 0x20]), st.integers(0, 255))


@examples(200)
@given(st.data(), sizes, sizes, st.booleans())
def test_text_does_not_depend_on_how_tokens_fell_into_steps(
    byte_fallback: PreTrainedTokenizerBase,
    data: st.DataObject,
    sizes: list[int],
    others: list[int],
    has_end_token: bool,
) -> None:
    """Nor on whether a stop string is looked for; bytes that make no character included."""
    words = st.sampled_from(["😀", "€", "a", " é", "漢", "\n"]).map(lambda text: fallback_ids(byte_fallback, text))
    torn = st.lists(some_bytes, min_size=1, max_size=4).map(lambda some: byte_ids(byte_fallback, bytes(some)))
    token_ids = [token for part in data.draw(st.lists(st.one_of(words, torn), max_size=14)) for token in part]
    plain, other, stopping = (
        joined(
            feed_in_pieces(IncrementalDetokenizer(byte_fallback, stop), token_ids, some, has_end_token=has_end_token)
        )
        for some, stop in ((sizes, ()), (others, ()), (sizes, ("\x00never",)))
    )
    assert plain == other == stopping
    whole = byte_fallback.decode(token_ids)
    if "\ufffd" not in whole:
        assert plain == whole


@pytest.mark.parametrize("sizes", [[1], [6], [4, 2], [5, 1], [2]])
def test_a_whole_character_outlives_a_torn_one_beside_it(
    byte_fallback: PreTrainedTokenizerBase, sizes: list[int]
) -> None:
    """Decoded together they are six characters that are none."""
    token_ids = fallback_ids(byte_fallback, "😀😀")[:6]
    assert byte_fallback.decode(token_ids) == 6 * "\ufffd"
    pieces = feed_in_pieces(IncrementalDetokenizer(byte_fallback), token_ids, sizes, has_end_token=False)
    assert joined(pieces) == "😀\ufffd\ufffd"


@examples(100)
@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_long_runs_without_text_lose_nothing_between_them(
    tokenizer: PreTrainedTokenizerBase,
    byte_fallback: PreTrainedTokenizerBase,
    data: st.DataObject,
    sizes: list[int],
    skip: bool,
) -> None:
    """Special tokens, ids that stand for nothing, and bytes: whole characters, and such as make none."""
    is_fallback = data.draw(st.booleans())
    used = byte_fallback if is_fallback else tokenizer

    def ids_of(text: str) -> list[int]:
        if is_fallback:
            return [6 + byte for byte in text.encode()]
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    torn = [6 + 0x80] if is_fallback else ids_of("😀")[-1:]
    parts = st.one_of(
        st.sampled_from(["日本", "😀", "é😀日", "\u200b"]).flatmap(
            lambda text: st.integers(1, 30).map(lambda n: ids_of(text * n))
        ),
        st.integers(1, 60).map(lambda n: [0] * n),
        st.integers(1, 60).map(lambda n: [9000] * n),
        # Bytes that make no character would tear the whole one before them, so a word goes in between.
        st.integers(1, 60).map(lambda n: [2, *torn * n, 2] if is_fallback else torn * n),
        st.integers(1, 3).map(lambda n: [1, 2, 3][:n]),
    )
    token_ids = [token for part in data.draw(st.lists(parts, max_size=8)) for token in part]
    for stop in ((), ("\x00never",)):
        detokenizer = IncrementalDetokenizer(used, stop, skip)
        pieces = feed_in_pieces(detokenizer, token_ids, sizes, has_end_token=True)
        assert joined(pieces) == used.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("stop", [(), ("\x00never",)])
@pytest.mark.parametrize("kind", ["special", "torn", "torn, then special", "text"])
def test_a_token_costs_the_same_however_many_came_before(
    tokenizer: PreTrainedTokenizerBase, kind: str, stop: tuple[str, ...]
) -> None:
    """Tokens decoded per token fed; decoding all pending ones again would be a thousand."""
    torn = tokenizer("😀", add_special_tokens=False)["input_ids"][-1]
    words = tokenizer("a b c\n" * 500, add_special_tokens=False)["input_ids"]
    token_ids = {"special": [0] * 2000, "torn": [torn] * 2000, "torn, then special": [torn] + [0] * 2000, "text": words}
    counting = Counting(tokenizer)
    pieces = feed_in_pieces(IncrementalDetokenizer(counting, stop), token_ids[kind], [1], has_end_token=True)
    assert counting.count < 50 * len(token_ids[kind])
    assert joined(pieces) == tokenizer.decode(token_ids[kind], skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [(), ("\x00never",)])
def test_no_piece_tears_a_character(tokenizer: PreTrainedTokenizerBase, text: str, stop: tuple[str, ...]) -> None:
    """Token by token, a replacement character is only ever shown where the text itself has one."""
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    pieces = feed_in_pieces(detokenizer, token_ids, [1], has_end_token=True)
    assert joined(pieces) == text
    assert sum("\ufffd" in piece.text for piece in pieces) == text.count("\ufffd")
    assert len(pieces) > len(text) / 8  # it streams, and does not wait for the end


def test_an_incomplete_character_is_shown_as_such_only_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = tokenizer("ok 😀", add_special_tokens=False)["input_ids"]
    for cut in range(1, len(token_ids)):
        whole = tokenizer.decode(token_ids[:cut], skip_special_tokens=True)
        for has_end_token in (True, False):
            pieces = feed_in_pieces(
                IncrementalDetokenizer(tokenizer), token_ids[:cut], [1], has_end_token=has_end_token
            )
            assert joined(pieces) == whole
            assert not any("\ufffd" in piece.text for piece in pieces[:-1])


@examples(150)
@given(st.data(), sizes)
def test_a_stop_string_is_found_across_any_border_of_tokens_and_steps(
    tokenizer: PreTrainedTokenizerBase, data: st.DataObject, sizes: list[int]
) -> None:
    text = data.draw(st.sampled_from([text for text in TEXTS if "\ufffd" not in text]))
    start = data.draw(st.integers(0, len(text) - 2))
    stop = text[start : start + data.draw(st.integers(1, 12))]
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    place = text.index(stop)
    pieces = feed_in_pieces(IncrementalDetokenizer(tokenizer, (stop,)), token_ids, sizes, has_end_token=False)
    assert joined(pieces) == text[:place]
    assert [piece.stop is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    # Counted are the tokens up to the one that completed the stop string, and no other.
    given = [token for piece in pieces for token in piece.token_ids]
    fewest = next(n for n in range(len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:n]))
    assert given == token_ids[:fewest]


def literal_stop(text: str, stop: tuple[str, ...]) -> str:
    """Character by character: the text before the first stop string to be completed (of several, the longest)."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stop if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)]
    return text


@examples(300)
@given(st.text("ab", max_size=25), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), sizes)
def test_overlapping_stop_strings_against_the_literal_search(text: str, stop: list[str], sizes: list[int]) -> None:
    """An alphabet of two letters: false starts, stop strings inside others and overlaps all the time."""
    detokenizer = IncrementalDetokenizer(Letters(), tuple(stop))
    pieces = feed_in_pieces(detokenizer, [ord(c) for c in text], sizes, has_end_token=False)
    expected = literal_stop(text, tuple(stop))
    assert joined(pieces) == expected
    assert bool(pieces and pieces[-1].stop is not None) == (expected != text or any(s in text for s in stop))


class Syllables:
    """A tokenizer of tokens of up to three letters."""

    TOKENS = ("a", "b", "ab", "ba", "aab", "abb", "bab")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.TOKENS[token] for token in token_ids)


@examples(300)
@given(
    st.lists(st.integers(0, len(Syllables.TOKENS) - 1), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    sizes,
)
def test_of_several_stop_strings_in_one_token_the_first_to_be_complete_counts(
    token_ids: list[int], stop: list[str], sizes: list[int]
) -> None:
    pieces = feed_in_pieces(IncrementalDetokenizer(Syllables(), tuple(stop)), token_ids, sizes, has_end_token=False)
    text = Syllables().decode(token_ids, skip_special_tokens=True)
    assert joined(pieces) == literal_stop(text, tuple(stop))


def test_nothing_that_could_become_a_stop_string_is_shown_early() -> None:
    rng = random.Random(0)
    for _ in range(200):
        stop = "".join(rng.choice("ab") for _ in range(rng.randint(1, 5)))
        detokenizer, shown, fed = IncrementalDetokenizer(Letters(), (stop,)), "", ""
        for _ in range(12):
            letter = rng.choice("ab")
            fed += letter
            piece = detokenizer.feed([ord(letter)], is_last=False)
            shown += piece.text
            if piece.stop is not None:
                break
            held = fed[len(shown) :]
            assert stop not in shown + held
            assert stop.startswith(held)  # held back only for a reason


def test_held_back_text_comes_with_the_end() -> None:
    for last_tokens in ([], [ord("c")]):
        detokenizer = IncrementalDetokenizer(Letters(), ("###",))
        assert detokenizer.feed([ord(c) for c in "ab##"], is_last=False).text == "ab"
        assert detokenizer.feed(last_tokens, is_last=True).text == "##" + "c" * len(last_tokens)


@pytest.mark.parametrize("stop", [("ok ",), (" \N{REPLACEMENT CHARACTER}",), ("never",)])
def test_a_stop_string_is_found_in_what_only_the_end_lets_out(stop: tuple[str, ...]) -> None:
    """The last token begins a character that never comes; its end token may be in the same step, or in one behind."""
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [("Ġ", "â"), ("Ġâ", "Ģ")]
    vocab = {**letters, **{first + second: len(letters) + i for i, (first, second) in enumerate(merges)}}
    decoder = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    decoder.decoder = decoders.ByteLevel()
    token_ids = [vocab["o"], vocab["k"], vocab["ĠâĢ"]]
    texts = []
    for has_end_token in (False, True):
        for sizes in ([1], [2], [3]):
            detokenizer = IncrementalDetokenizer(decoder, stop, True, token_texts(decoder, skip_special_tokens=True))
            pieces = feed_in_pieces(detokenizer, token_ids, sizes, has_end_token=has_end_token)
            texts.append((joined(pieces), pieces[-1].stop is not None))
    expected = "ok \N{REPLACEMENT CHARACTER}".partition(stop[0])
    assert set(texts) == {(expected[0], bool(expected[1]))}


def test_tokens_behind_a_stop_string_of_the_same_step_are_dropped() -> None:
    piece = IncrementalDetokenizer(Letters(), ("##",)).feed([ord(c) for c in "ab##cd##"], is_last=True)
    assert (piece.text, piece.token_ids, piece.stop is not None) == ("ab", [ord(c) for c in "ab##"], True)


def test_without_a_tokenizer_there_are_token_ids_only() -> None:
    piece = IncrementalDetokenizer(None).feed([1, 2], is_last=True)
    assert (piece.text, piece.token_ids) == ("", [1, 2])


def test_the_compiled_decoder_is_taken_only_where_it_says_the_same(tokenizer: PreTrainedTokenizerBase) -> None:
    decoder = decoder_of(tokenizer)
    assert decoder is not None
    assert decoder is not tokenizer
    rng = random.Random(5)
    special = [token_id for token_id in tokenizer.all_special_ids if token_id < len(tokenizer)]
    for text in TEXTS:
        token_ids = tokenizer(text)["input_ids"]
        for _ in range(20):
            start = rng.randrange(len(token_ids))
            part = [*token_ids[start : start + rng.randint(0, 9)], *rng.sample(special, 1), len(tokenizer) + 7]
            for is_skipping in (True, False):
                right = tokenizer.decode(part, skip_special_tokens=is_skipping)
                assert decoder.decode(part, skip_special_tokens=is_skipping) == right

    class Shouting(type(tokenizer)):  # type: ignore[misc]
        def decode(self, *arguments: object, **options: object) -> str:
            return str(super().decode(*arguments, **options)).upper()

    own = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    cleaning = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, clean_up_tokenization_spaces=True)
    assert decoder_of(own) is own
    assert decoder_of(None) is None
    # What is out cannot be joined with what comes: nobody cleans up spaces.
    spaced = tokenizer("don ' t stop .", add_special_tokens=False)["input_ids"]
    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer, clean_up_tokenization_spaces=True)
    for each, right in ((cleaning, "don ' t stop ."), (shouting, "DON ' T STOP .")):
        found = decoder_of(each)
        assert found is not None
        assert found.decode(spaced, skip_special_tokens=True) == right
