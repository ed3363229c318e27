"""Converts a SentencePiece model (tokenizer.model) into a tokenizer that gives exactly its token ids.

transformers' own conversion loses the space in front of a text, Unigram models or the normalisation, depending on the
class that a folder names. The tokenizer built here is compared with the SentencePiece model itself.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from batchserve.errors import ConfigError

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # SentencePiece.Type
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class NotSentencePieceError(ValueError):
    """The file is not a SentencePiece model."""


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A SentencePiece model, read by its own library."""

    file: Path
    processor: Any
    proto: Any

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens, under their names in tokenizer_config.json."""
        ids = {name: getattr(self.processor, f"{name}_id")() for name in ("bos", "eos", "unk", "pad")}
        return {f"{name}_token": self.proto.pieces[i].piece for name, i in ids.items() if i >= 0}

    def pieces(self, text: str) -> list[str]:
        return [self.processor.id_to_piece(i) for i in self.processor.encode(text)]


def read(file: Path) -> SentencePieceModel:
    """Loads a SentencePiece model. Raises ConfigError if the library is not installed, or NotSentencePieceError."""
    try:
        library = importlib.import_module("sentencepiece")
        schema = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise ConfigError(
            f"{file}: needs sentencepiece, which is not installed: pip install 'batchserve[tokenizers]', or put a "
            "tokenizer.json beside it"
        ) from error
    processor, proto = library.SentencePieceProcessor(), schema.ModelProto()
    try:
        processor.Load(str(file))
        proto.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf and sentencepiece raise errors of their own types
        raise NotSentencePieceError(str(error)) from error
    return SentencePieceModel(file, processor, proto)


def convert(model: SentencePieceModel, probes: Sequence[str], *, adds_bos: bool) -> Tokenizer:
    """Returns a tokenizer that gives the model's ids. With adds_bos, a text begins with the BOS token, if there is one.

    probes: texts for which both must give the same ids. Raises ConfigError if they do not.
    """
    proto, processor = model.proto, model.processor
    user_defined = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    texts = [*probes, *(f"a {piece} b" for piece in user_defined[:8])]
    tokenizer = _build(proto)
    wrong = [text for text in texts if tokenizer.encode(text).ids != processor.encode(text)]
    if wrong:
        raise ConfigError(
            f"{model.file}: cannot be converted: the ids of {wrong[0]!r} would be other than SentencePiece's own; "
            "put a tokenizer.json beside it"
        )
    _add_bos(tokenizer, proto, processor.bos_id() if adds_bos else -1)
    return tokenizer


def _build(proto: Any) -> Tokenizer:
    spec = proto.normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer = Tokenizer(_model(proto))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    # Split off user-defined symbols here. As added tokens, they would put a space in front of the text after them.
    symbols = sorted((piece.piece for piece in proto.pieces if piece.type == USER_DEFINED), key=len, reverse=True)
    if symbols:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, symbols))), "isolated")
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else [])])
    control = [AddedToken(piece.piece, normalized=False) for piece in proto.pieces if piece.type == CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer


def _model(proto: Any) -> Any:
    kind, spec = proto.trainer_spec.model_type, proto.trainer_spec
    if kind == UNIGRAM:
        # A user-defined symbol scores 0, so no other segmentation is as likely.
        scored = [(piece.piece, 0.0 if piece.type == USER_DEFINED else piece.score) for piece in proto.pieces]
        return models.Unigram(scored, spec.unk_id, spec.byte_fallback)
    if kind != BPE:
        raise ConfigError(f"SentencePiece model type {kind}: must be unigram (1) or bpe (2)")
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    unknown = proto.pieces[spec.unk_id].piece
    options = {"fuse_unk": True, "byte_fallback": spec.byte_fallback}
    # Merges do not make user-defined symbols.
    has_symbols = any(piece.type == USER_DEFINED for piece in proto.pieces)
    return models.BPE(vocab, _merges(proto), unk_token=unknown, ignore_merges=has_symbols, **options)


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Returns every way to make a piece from two others, the best piece first."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    ordered = sorted(scores, key=lambda piece: -scores[piece])
    pairs = ((piece[:cut], piece[cut:]) for piece in ordered for cut in range(1, len(piece)))
    return [(left, right) for left, right in pairs if left in scores and right in scores]


def _add_bos(tokenizer: Tokenizer, proto: Any, bos_id: int) -> None:
    if bos_id < 0:
        return
    bos = proto.pieces[bos_id].piece
    template = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)])
    tokenizer.post_processor = template
