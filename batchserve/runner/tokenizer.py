"""Loads a model's tokenizer, and checks that it gives the ids that its files mean: wrong ids raise no error.

transformers picks a class by names in the configuration, and rebuilds the tokenizer as that class does. If another
class was meant, the ids are silently wrong, so they are compared with the files.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import shutil
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import CTC, WordPiece
from tokenizers.models import WordPiece as WordPieceModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batchserve.config import EngineConfig
from batchserve.errors import BatchserveError, ConfigError, UnsupportedModelError, one_line, shortened
from batchserve.runner import sentencepiece_model
from batchserve.runner.compiled_tokenizer import compiled_of
from batchserve.runner.sentencepiece_model import NotSentencePieceError, SentencePieceModel

if TYPE_CHECKING:
    from batchserve.runner.compiled_tokenizer import AnyTokenizer

logger = logging.getLogger(__name__)
PROBES = (
    "Hello world, it's 12345 o'clock!",
    " leading and  double spaces",
    "Ça coûte 42 €: naïve café, Größe",
    "Привет, мир! שלום مرحبا",
    "你好,世界。こんにちは 안녕",
    "def f(x):\n\treturn x ** 2  # 😀👍🏽\n  end",
)
TOKENIZER, CONFIG, TEKKEN = "tokenizer.json", "tokenizer_config.json", "tekken.json"
MODEL_FILES = ("tokenizer.model", "tokenizer.model.*", "*.model")
# Classes with the same ids as the SentencePiece model.
GENERIC = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
# Files that hold a vocabulary. A tokenizer_config.json alone has none.
VOCABULARIES = (TOKENIZER, *MODEL_FILES, TEKKEN, "vocab.json", "vocab.txt", "*.tiktoken")
# Files that are read in addition to a vocabulary.
COMPANIONS = ("added_tokens.json", "chat_template*.jinja", "additional_chat_templates")
MAX_UNMADE = 0.1  # of tokens with several letters: some vocabularies have special tokens that are not marked
TEKKEN_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}


def load_tokenizer(source: str, config: EngineConfig) -> AnyTokenizer | None:
    """Returns None for a folder without a tokenizer: the model then takes only token ids.

    Returns one of transformers' only if it has Python code of its own.

    Raises ConfigError, or UnsupportedModelError for a tokenizer whose text cannot be put together from pieces.
    """
    folder = Path(source)
    if not (_vocabulary_files(folder) or (folder / CONFIG).exists()):
        return None
    try:
        loaded = _load(folder, config)
        _refuse_lossy(loaded, config)
        loaded = _as_the_file_says(loaded, folder)
        _compare_with_model_file(loaded, folder)
        _check_round_trip(loaded, folder)
        _check_merges(loaded, folder)
        _add_chat_template(loaded, folder)
    except BatchserveError:
        raise
    except Exception as error:
        raise ConfigError(f"model = {config.model!r}: its tokenizer {_failure(error, folder)}") from error
    loaded.model_max_length = sys.maxsize  # prompts are checked elsewhere, and references may be longer
    found: AnyTokenizer = compiled_of(loaded, PROBES)
    return found


def _failure(error: Exception, folder: Path) -> str:
    files = [file.name for file in _vocabulary_files(folder)] or [CONFIG]
    if isinstance(error, ValueError) and TOKENIZER not in files and "backend tok" in str(error):
        return f"cannot be made from {', '.join(files)} alone: no class that reads it is named; put a {TOKENIZER} there"
    return f"cannot be loaded: {type(error).__name__}: {one_line(error)}"


def check_vocabulary(tokenizer: AnyTokenizer | None, vocab_size: int, config: EngineConfig) -> None:
    """Raises ConfigError if plain text gets ids that the model does not have: the tokenizer is another model's."""
    if tokenizer is None:
        return
    largest = max((max(tokenizer(text)["input_ids"], default=0) for text in PROBES), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"model = {config.model!r}: its tokenizer gives token id {largest}, must be in 0..{vocab_size - 1}: "
            "it is another model's"
        )


def _vocabulary_files(folder: Path) -> list[Path]:
    return [file for name in VOCABULARIES for file in sorted(folder.glob(name))]


def _load(folder: Path, config: EngineConfig) -> PreTrainedTokenizerBase:
    settings = _object(folder / CONFIG)
    if _is_to_be_converted(folder, config):
        return _from_model_file(folder, settings, config)
    if (folder / TEKKEN).exists() and not (folder / TOKENIZER).exists():
        more = {name: value for name, value in TEKKEN_TOKENS.items() if name not in settings}
        return _automatic(folder, config, **more)
    try:
        return _automatic(folder, config)
    except Exception as error:
        if isinstance(error, ImportError) or not (folder / TOKENIZER).exists():
            raise
    # The named class cannot be made from the file. If the file itself is wrong, the next line raises the reason.
    loaded: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


def _from_model_file(folder: Path, settings: dict[str, Any], config: EngineConfig) -> PreTrainedTokenizerBase:
    file = next(found for name in MODEL_FILES for found in sorted(folder.glob(name)))
    try:
        model = sentencepiece_model.read(file)
    except NotSentencePieceError as error:
        _check_tiktoken(file, folder, settings, error)
        loaded = _automatic(folder, config, add_bos_token=settings.get("add_bos_token") is not False)
    else:
        name = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if name in GENERIC or not (hasattr(transformers, name) or "auto_map" in settings):
            loaded = _converted(model, settings)
        else:  # the class may have its own ids for the same pieces
            loaded = _automatic(folder, config)
            _compare_pieces(loaded, model)
    _check_added_tokens(loaded, folder, settings)
    return loaded


def _automatic(folder: Path, config: EngineConfig, **options: Any) -> PreTrainedTokenizerBase:
    # mistral-common's own tokenizer has another interface, and lacks most options.
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=config.trust_remote_code, mistral_format=False, **options
    )
    return loaded


def _is_to_be_converted(folder: Path, config: EngineConfig) -> bool:
    """True if there is only a SentencePiece model, and no code of the folder's own reads it."""
    has_other = any((folder / name).exists() for name in (TOKENIZER, TEKKEN, "vocab.json", "vocab.txt"))
    has_code = config.trust_remote_code and "auto_map" in _object(folder / CONFIG)
    return not has_other and not has_code and any(any(folder.glob(name)) for name in MODEL_FILES)


def _converted(model: SentencePieceModel, settings: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Converts a SentencePiece model, and adds the special tokens and templates of the files next to it."""
    rust = sentencepiece_model.convert(model, PROBES, adds_bos=settings.get("add_bos_token") is not False)
    beside = model.file.parent
    special = model.special_tokens | _object(beside / "special_tokens_map.json")
    with tempfile.TemporaryDirectory() as name:
        for pattern in COMPANIONS:
            for companion in beside.glob(pattern):
                (shutil.copytree if companion.is_dir() else shutil.copy)(companion, Path(name) / companion.name)
        (Path(name) / CONFIG).write_text(json.dumps(special | settings), encoding="utf-8")
        rust.save(str(Path(name) / TOKENIZER))
        loaded: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(name)
    return loaded


def _check_tiktoken(file: Path, folder: Path, settings: dict[str, Any], error: Exception) -> None:
    """Raises ConfigError for tiktoken vocabularies, which lack special tokens and split rules, except for Llama 3's."""
    is_llama = str(_object(folder / "config.json").get("model_type")).startswith(("llama", "mllama"))
    first = file.read_bytes()[:200].split(b"\n", 1)[0].split()
    if len(first) != 2 or not first[1].isdigit():
        raise ConfigError(f"{file}: is neither a SentencePiece model nor a tiktoken vocabulary: {one_line(error)}")
    if not is_llama or "added_tokens_decoder" not in settings:
        raise ConfigError(
            f"{file}: is a tiktoken vocabulary, which says neither how text is split nor which tokens are special; put "
            "the model's tokenizer.json beside it"
        )
    if importlib.util.find_spec("tiktoken") is None:
        raise ConfigError(f"{file}: needs tiktoken, which is not installed: pip install 'batchserve[tokenizers]'")


def _compare_pieces(loaded: PreTrainedTokenizerBase, model: SentencePieceModel) -> None:
    for text in PROBES:
        if _pieces(loaded, text) != model.pieces(text):
            raise ConfigError(
                f"{model.file}: {type(loaded).__name__} gives other tokens for {text!r} than SentencePiece; put a "
                "tokenizer.json beside it"
            )


def _check_added_tokens(loaded: PreTrainedTokenizerBase, folder: Path, settings: dict[str, Any]) -> None:
    """Raises ConfigError if a token that the files add has another id."""
    added = {token: int(i) for token, i in _object(folder / "added_tokens.json").items()}
    for i, token in dict(settings.get("added_tokens_decoder") or {}).items():
        added[token["content"] if isinstance(token, dict) else str(token)] = int(i)
    known = loaded.get_vocab()
    for token, i in added.items():
        if known.get(token) != i:
            raise ConfigError(
                f"{folder}: token {token!r} has id {known.get(token)} after conversion, must be {i}; put a "
                "tokenizer.json there"
            )


def _refuse_lossy(loaded: PreTrainedTokenizerBase, config: EngineConfig) -> None:
    """Refuses tokenizers that do not decode to the original text: WordPiece loses spaces, CTC merges equal tokens."""
    rust = getattr(loaded, "backend_tokenizer", None)
    decoder = getattr(rust, "decoder", None)
    kind = "WordPiece" if isinstance(getattr(rust, "model", None), WordPieceModel) else type(decoder).__name__
    if isinstance(decoder, WordPiece | CTC) or kind == "WordPiece":
        raise UnsupportedModelError(
            f"model = {config.model!r}: its tokenizer is of type {kind}, whose tokens do not say how the text was "
            "written (spaces are lost); must be byte-level or SentencePiece. Without its tokenizer files the model "
            "takes token ids"
        )


def _as_the_file_says(loaded: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer, or tokenizer.json's own if its ids differ because transformers chose the wrong class."""
    file = folder / TOKENIZER
    if not file.exists() or not hasattr(loaded, "backend_tokenizer"):
        return loaded
    written = Tokenizer.from_file(str(file))
    written.no_truncation()
    written.no_padding()
    _note_bos(written, folder)
    if _agree(loaded, written):
        return loaded
    verbatim: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    if not _agree(verbatim, written):  # the configuration asks for the difference, such as add_prefix_space
        logger.warning("%s: tokenizer_config.json changes the token ids that tokenizer.json gives", folder)
        return loaded
    logger.warning("%s: is used as it is: as %s its ids would be others", file, type(loaded).__name__)
    return verbatim


def _note_bos(written: Tokenizer, folder: Path) -> None:
    """Warns if tokenizer_config.json asks otherwise: only tokenizer.json decides whether a text begins with a BOS."""
    settings = _object(folder / CONFIG)
    asked, bos = settings.get("add_bos_token"), settings.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    if not isinstance(asked, bool) or not isinstance(bos, str):
        return
    has_bos = written.encode(PROBES[0]).ids[:1] == [written.token_to_id(bos)]
    if has_bos != asked:
        begins = "begin" if has_bos else "do not begin"
        logger.warning("%s: add_bos_token = %s, but texts %s with %s by %s", folder, asked, begins, bos, TOKENIZER)


def _agree(loaded: PreTrainedTokenizerBase, written: Tokenizer) -> bool:
    try:
        return all(loaded(text)["input_ids"] == written.encode(text).ids for text in PROBES)
    except Exception:  # the class may need something that the files lack
        return False


def _compare_with_model_file(loaded: PreTrainedTokenizerBase, folder: Path) -> None:
    """Warns if a SentencePiece model next to tokenizer.json gives other tokens: one of them is another model's."""
    file = folder / "tokenizer.model"
    if not (file.is_file() and (folder / TOKENIZER).exists() and importlib.util.find_spec("sentencepiece")):
        return
    try:
        model = sentencepiece_model.read(file)
    except NotSentencePieceError:
        return
    # Libraries differ in how they treat a leading space.
    texts = [text for text in PROBES if not text.startswith(" ")]
    differing = [text for text in texts if _pieces(loaded, text) != model.pieces(text)]
    if differing:
        logger.warning("%s: gives other tokens for %r than %s, which is used", file, differing[0], TOKENIZER)


def _pieces(loaded: PreTrainedTokenizerBase, text: str) -> list[str]:
    return list(loaded.convert_ids_to_tokens(loaded(text, add_special_tokens=False)["input_ids"]))


def _check_round_trip(loaded: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises ConfigError if text does not survive a round trip. A vocabulary with all bytes can represent any text."""
    vocab = loaded.get_vocab()
    if not any(loaded(text, add_special_tokens=False)["input_ids"] for text in PROBES):
        raise ConfigError(
            f"{folder}: its tokenizer ({type(loaded).__name__}) makes no tokens of any text: its files are not "
            "complete, or are for another class; put the model's tokenizer.json there"
        )
    has_bytes = all(f"<0x{i:02X}>" in vocab for i in range(256)) or set(ByteLevel.alphabet()) <= vocab.keys()
    if not has_bytes and _vocabulary_files(folder):
        return  # unknown characters are lost, as intended
    for text in PROBES:
        back = str(loaded.decode(loaded(text, add_special_tokens=False)["input_ids"]))
        if _letters(back) != _letters(text):
            raise ConfigError(
                f"{folder}: its tokenizer ({type(loaded).__name__}) turns {text!r} into {shortened(back)}: its files "
                "are not complete, or are for another class; put the model's tokenizer.json there"
            )


def _check_merges(loaded: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises ConfigError if merges.txt is cut short. Bytes alone can represent any text, but in wrong tokens."""
    if (folder / TOKENIZER).exists() or not (folder / "merges.txt").exists():
        return
    added = set(loaded.get_added_vocab())
    long = [token for token in loaded.get_vocab() if len(token) > 1 and token not in added]
    lines = (folder / "merges.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    made = {line.replace(" ", "") for line in lines}
    num_unmade = sum(token not in made for token in long)
    if num_unmade > MAX_UNMADE * len(long):
        raise ConfigError(
            f"{folder}: merges.txt makes {len(long) - num_unmade} of the {len(long)} tokens of vocab.json that have to "
            "be made: it is not complete; download it again"
        )


def _letters(text: str) -> str:
    """Removes what normalisers may change: compatibility forms, case and whitespace."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _add_chat_template(loaded: PreTrainedTokenizerBase, folder: Path) -> None:
    """Adds the template of chat_template.json, which transformers reads only for processors, or of tekken.json."""
    if loaded.chat_template:
        return
    loaded.chat_template = _object(folder / "chat_template.json").get("chat_template")
    if loaded.chat_template is None and (folder / TEKKEN).exists():
        try:
            made = importlib.import_module("mistral_common.integrations.chat_templates.chat_templates")
        except ImportError:  # reported when a template is needed
            return
        loaded.chat_template = made.convert_tokenizer_to_chat_template(str(folder / TEKKEN))


def _object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty one if there is no file. Raises ConfigError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: must hold an object, not {type(content).__name__}")
    return content
