"""Several drafters behind one: each request's calls reach the one it has chosen, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree, NullDrafter
from batchserve.draft.kernels import KernelLoader
from batchserve.draft.router import PersistentDrafter, RoutingDrafter
from batchserve.errors import ConfigError
from batchserve.request import DraftScope

SCOPE = DraftScope("default", "a")


class Recorder(Drafter):
    """Writes down every call; proposes its own number, one node for each token asked for."""

    name = "recorder"

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[tuple[Any, ...]] = []

    def start(self, request: DraftRequest) -> None:
        self.calls.append(("start", request.request_id))

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        self.calls.append(("propose", [query.request_id for query in queries]))
        count = [q.max_tokens for q in queries]
        return [DraftTree([self.number] * n, [*range(-1, n - 1)], [0.1 * self.number] * n, [True] * n) for n in count]

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.calls.append(("observe", request_id, token_ids))

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.calls.append(("accept", request_id, token_ids))

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.calls.append(("share", request_id, token_ids))

    def end(self, request_id: str) -> None:
        self.calls.append(("end", request_id))

    def clear_scope(self, scope: DraftScope) -> None:
        self.calls.append(("clear_scope", scope))

    def memory_bytes(self) -> int:
        return 10**self.number


class Storing(Recorder):
    def num_tokens(self) -> int:
        return self.number

    def save(self, path: Path, fingerprint: str) -> None:
        self.calls.append(("save", path, fingerprint))

    def load(self, path: Path, fingerprint: str, vocab_size: int) -> None:
        self.calls.append(("load", path, fingerprint, vocab_size))


class Kernels(KernelLoader):
    """Ready when the test says so."""

    def __init__(self, *unready: str) -> None:
        super().__init__(in_background=True)
        self.unready = set(unready)
        self.is_closed = False

    def is_ready(self, module: str) -> bool:
        return module not in self.unready

    def prepare(self, module: str) -> None:
        self.unready.discard(module)

    def close(self) -> None:
        self.is_closed = True


def query(request_id: str, max_tokens: int = 1) -> DraftQuery:
    return DraftQuery(request_id, max_tokens, max_tokens)


def start(router: RoutingDrafter, request_id: str, drafter: str = "") -> None:
    router.start(DraftRequest(request_id, [1, 2], drafter=drafter))


@pytest.fixture
def drafters() -> dict[str, Recorder]:
    return {"one": Recorder(1), "two": Recorder(2), "three": Storing(3)}


@pytest.fixture
def router(drafters: dict[str, Recorder]) -> RoutingDrafter:
    return RoutingDrafter("one", drafters, Kernels())


def test_one_call_serves_requests_of_different_drafters_in_their_order(
    router: RoutingDrafter, drafters: dict[str, Recorder]
) -> None:
    for name, drafter in (("a", "two"), ("b", ""), ("c", "two"), ("d", "three"), ("e", "one")):
        start(router, name, drafter)
    trees = router.propose([query("d", 2), query("a"), query("b", 3), query("c"), query("e")])
    assert [tree.token_ids for tree in trees] == [[3, 3], [2], [1, 1, 1], [2], [1]]
    assert drafters["one"].calls[-1] == ("propose", ["b", "e"])
    assert drafters["two"].calls[-1] == ("propose", ["a", "c"])


def test_every_call_of_a_request_reaches_its_own_drafter_only(
    router: RoutingDrafter, drafters: dict[str, Recorder]
) -> None:
    start(router, "a", "two")
    router.propose([query("a")])
    router.observe("a", [7])
    router.accept("a", [8])
    router.share("a", [9])
    router.end("a")
    calls = [("start", "a"), ("propose", ["a"]), ("observe", "a", [7]), ("accept", "a", [8]), ("share", "a", [9])]
    assert drafters["two"].calls == [*calls, ("end", "a")]
    assert drafters["one"].calls == drafters["three"].calls == []
    start(router, "a", "one")  # the id is free for another drafter
    assert drafters["one"].calls == [("start", "a")]


def test_a_request_is_started_once(router: RoutingDrafter) -> None:
    start(router, "a", "two")
    with pytest.raises(ValueError, match="'a' has draft state already"):
        start(router, "a", "one")


def test_readiness_is_each_drafters_own(drafters: dict[str, Recorder]) -> None:
    router = RoutingDrafter("one", {**drafters, "none": NullDrafter()}, Kernels(__name__))
    assert not router.is_ready_for("")
    assert not router.is_ready_for("two")
    assert router.is_ready_for("none")  # compiled parts are a module's: this one is elsewhere
    router.prepare()
    assert router.is_ready_for("")
    assert router.is_ready_for("two")


def test_scopes_and_memory_are_those_of_the_drafters_in_use(
    router: RoutingDrafter, drafters: dict[str, Recorder]
) -> None:
    """A drafter that nobody has chosen may not even be ready."""
    start(router, "a", "one"), start(router, "b", "three")
    router.clear_scope(SCOPE)
    assert router.memory_bytes() == 10 + 1000
    assert [("clear_scope", SCOPE) in drafter.calls for drafter in drafters.values()] == [True, False, True]


def test_what_the_default_drafter_shares_is_saved_and_loaded(drafters: dict[str, Recorder], tmp_path: Path) -> None:
    router, path = RoutingDrafter("three", drafters, Kernels()), tmp_path / "drafts"
    assert isinstance(router.persistent(), PersistentDrafter)
    router.save(path, "f")
    assert drafters["three"].calls == [], "it was never used: what is in the file stays"
    router.load(path, "f", 99)
    router.save(path, "g")
    assert drafters["three"].calls == [("load", path, "f", 99), ("save", path, "g")]


def test_a_drafter_that_cannot_be_saved_is_refused_by_name(router: RoutingDrafter, tmp_path: Path) -> None:
    for call in (router.persistent, lambda: router.save(tmp_path, ""), lambda: router.load(tmp_path, "", 9)):
        with pytest.raises(ConfigError, match=r"drafter = 'one': .*three can"):
            call()


def test_closing_ends_what_is_being_prepared(drafters: dict[str, Recorder]) -> None:
    kernels = Kernels()
    RoutingDrafter("one", drafters, kernels).close()
    assert kernels.is_closed
