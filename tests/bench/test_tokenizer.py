"""Every kind of tokenizer that a replay takes, and what is said of those that it does not."""

from __future__ import annotations

import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from batchserve.bench.tokenizer import load_encoder
from batchserve.errors import ConfigError

BUNDLED = Path(str(resources.files("batchserve"))) / "data" / "bundled"
TEXT = 'def f(x):\n    return {"answer": "42"}  # déjà vu'


def test_the_bundled_tokenizer_by_name_folder_and_file():
    expected = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    assert len(expected) > 10
    for name in ("bundled", str(BUNDLED), str(BUNDLED / "tokenizer.json")):
        assert load_encoder(name)(TEXT) == expected


def test_a_stored_truncation_is_not_applied(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    expected = tokenizer.encode(TEXT, add_special_tokens=False).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_encoder(str(tmp_path))(TEXT) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the extension's build
def test_a_sentencepiece_model_by_name_file_and_folder(tmp_path: Path):
    pytest.importorskip("sentencepiece")
    package = pytest.importorskip("mistral_common")
    model = Path(package.__file__).parent / "data" / "tokenizer.model.v1"
    encode = load_encoder("mistral-v1")
    token_ids = encode(TEXT)
    assert 10 < len(token_ids) < len(TEXT)
    assert max(token_ids) < 32000
    assert min(token_ids) > 2, "no special tokens"
    assert load_encoder(str(model))(TEXT) == token_ids
    shutil.copy(model, tmp_path / "tokenizer.model")
    assert load_encoder(str(tmp_path))(TEXT) == token_ids


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_that_are_no_tokenizers(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_encoder(str(tmp_path / "none.model"))
    with pytest.raises(ConfigError, match=r"neither a tokenizer\.json nor a tokenizer\.model"):
        load_encoder(str(tmp_path))
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_encoder(str(broken))
    pytest.importorskip("sentencepiece")
    other = tmp_path / "some.model"
    for content in (b"", b"not a model at all"):
        other.write_bytes(content)
        with pytest.raises(ConfigError, match="is not a SentencePiece model"):
            load_encoder(str(other))


@pytest.mark.parametrize(("name", "package"), [("mistral-v1", "mistral_common"), ("some.model", "sentencepiece")])
def test_a_package_that_is_not_installed_is_named(name: str, package: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    Path("some.model").write_bytes(b"any")
    with pytest.raises(ConfigError, match=rf"needs {package}, which is not installed: .*batchserve\[bench\]"):
        load_encoder(name)
