"""Which addresses only this machine can reach."""

from __future__ import annotations

import socket

import pytest

from batchserve.hosts import is_loopback

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.255.255.254",
        "::1",
        "[::1]",
        "::1%lo",
        "::ffff:127.0.0.1",
        "0:0:0:0:0:0:0:1",
        "localhost",
        "127.1",
    ],
)
def test_loopback(host: str):
    assert is_loopback(host)


UNKNOWN_HOSTS = ["nobody.invalid", "a" * 300, "\udcff", ""]


@pytest.mark.parametrize(
    "host",
    [
        *("0.0.0.0", "0", "10.0.0.1", "::", "[::]", "::ffff:10.0.0.1", "::ffff:0.0.0.0", "fe80::1%eth0"),
        *UNKNOWN_HOSTS,
    ],
)
def test_not_loopback(host: str):
    assert not is_loopback(host)


@pytest.mark.parametrize(("addresses", "expected"), [(["127.0.0.1", "::1"], True), (["127.0.0.1", "10.0.0.1"], False)])
def test_a_name_is_what_all_of_its_addresses_are(monkeypatch: pytest.MonkeyPatch, addresses: list[str], expected: bool):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    assert is_loopback("a.name") == expected
