"""The memory policy of the CPU path."""

import platform

import pytest

from batchserve import malloc
from batchserve.malloc import keep_freed_memory


@pytest.fixture(autouse=True)
def _no_choice_of_the_users(monkeypatch):
    for name in malloc.CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_glibc_takes_the_settings():
    assert keep_freed_memory()


@pytest.mark.parametrize("name", malloc.CHOSEN_BY_USER)
def test_what_the_user_has_chosen_stays(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    calls = []
    monkeypatch.setattr(malloc.ctypes, "CDLL", calls.append)
    assert not keep_freed_memory()
    assert not calls


def test_another_libc_is_left_alone(monkeypatch):
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
