"""What a process has kept for the next one is what it wrote, or nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchserve.sealed_files import UntrustedFileError, read_sealed, write_sealed

pytestmark = pytest.mark.faults

CONTENT = random.Random(1).randbytes(3000)
FILL = """
import resource, sys
from pathlib import Path
from batchserve.sealed_files import write_sealed
for most in (0, 10, 60, 2000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        write_sealed(Path(sys.argv[1]), "numbers", bytes(5000))
    except OSError:
        print("refused")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_sealed(tmp_path / "kept", "numbers", CONTENT)
    return tmp_path / "kept"


def test_what_was_written_is_read_under_its_own_label_only(path: Path) -> None:
    assert read_sealed(path, "numbers") == CONTENT
    assert read_sealed(path.with_name("missing"), "numbers") is None
    with pytest.raises(UntrustedFileError, match="is damaged"):
        read_sealed(path, "other numbers")


@pytest.mark.parametrize("seed", range(5))
def test_no_bit_may_differ(path: Path, seed: int) -> None:
    whole, chance = path.read_bytes(), random.Random(seed)
    for place in [*range(10 * seed, 10 * seed + 10), *chance.sample(range(len(whole)), 30)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        for damaged in (bytes(flipped), whole[:place], whole + whole[: place + 1]):
            path.write_bytes(damaged)
            with pytest.raises(UntrustedFileError, match="is damaged"):
                read_sealed(path, "numbers")


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (link, "cannot be read"),
        (pipe, "is not a regular file"),
        (folder, "is not a regular file"),
        (lambda path: path.chmod(0o620), "can be written by other users"),
        (lambda path: path.chmod(0o602), "can be written by other users"),
    ],
    ids=["link", "pipe", "folder", "group", "others"],
)
def test_what_somebody_else_may_have_put_there_is_not_read(
    path: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(path)
    with pytest.raises(UntrustedFileError, match=reason):
        read_sealed(path, "numbers")


def test_a_file_of_another_user_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UntrustedFileError, match="belongs to another user"):
        read_sealed(path, "numbers")


def test_where_the_disk_is_full_the_old_file_stays(path: Path) -> None:
    """A limit of the file's size fails as a full disk does, and takes no privileges."""
    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 4
    assert read_sealed(path, "numbers") == CONTENT
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"


@pytest.mark.skipif(os.geteuid() != 0, reason="must be root to mount a file system")
def test_on_a_disk_that_is_really_full_nothing_is_left(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(OSError, match="No space left"):
            write_sealed(tmp_path / "kept", "numbers", bytes(1 << 17))
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_several_may_write_while_others_read(path: Path) -> None:
    def write(number: int) -> None:
        for _ in range(30):
            write_sealed(path, "numbers", bytes([number]) * 50_000)

    with ThreadPoolExecutor(3) as writers:
        writing = [writers.submit(write, number) for number in range(3)]
        while not all(each.done() for each in writing):
            content = read_sealed(path, "numbers")
            assert content == CONTENT or (content is not None and len(set(content)) == 1)
    assert list(path.parent.iterdir()) == [path]
