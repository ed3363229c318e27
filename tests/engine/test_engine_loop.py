"""The engine's loop: a client that cannot be told of its answer loses it alone, and drafts are saved at any end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchserve.engine.engine_loop import EngineLoop
from batchserve.engine.messages import Add, ClearScope, Done, End, Events, Failed, Reply
from batchserve.engine.output_collector import OutputCollector
from batchserve.errors import EngineFaultError
from batchserve.grammar.compiler import GrammarCompiler
from batchserve.request import DraftScope, NewRequest, ResolvedSpeculation
from batchserve.types import Delta
from tests.engine.scripted import ScriptedEngine, scripted_engine
from tests.factories import make_sampling

pytestmark = pytest.mark.faults
NAMES = ("a", "bad", "c")


class Rig:
    """A loop over a core whose answers are known, and all that it has said."""

    def __init__(self, send: Callable[[Reply], None] | None = None, draft_cache: str | None = None) -> None:
        self.engine: ScriptedEngine = scripted_engine(is_drafting=True)
        self.engine.core.executor.bind_thread = lambda: None  # type: ignore[method-assign]
        self.engine.core.executor.check_device = lambda: None  # type: ignore[method-assign]
        self.said: list[Reply] = []
        self.saved: list[Path] = []
        self.is_closed = False
        self.engine.core.drafter.close = self._close  # type: ignore[method-assign]
        self.refuse = send or (lambda reply: None)
        info, grammars = SimpleNamespace(vocab_size=128), GrammarCompiler(lambda: None)
        built: Any = SimpleNamespace(core=self.engine.core, save_drafts=self.saved.append, info=info, grammars=grammars)
        self.loop = EngineLoop(built, draft_cache, self._send)

    def _send(self, reply: Reply) -> None:
        self.refuse(reply)
        self.said.append(reply)

    def _close(self) -> None:
        self.is_closed = True

    def add(self, name: str, ticket: int, *, is_whole: bool = False, stop: tuple[str, ...] = ()) -> None:
        prompt = [ord(c) for c in "prompt"]
        self.engine.runner.scripts[name] = prompt + [ord(c) for c in name * 60]
        sampling = make_sampling(max_tokens=20, stop=stop)
        request = NewRequest(name, prompt, sampling, ResolvedSpeculation(), 0.0, is_whole=is_whole)
        self.loop.inbox.put(Add(ticket, request))

    def run(self) -> None:
        """As long as there is work; then as a program ends it."""
        turns = 0
        while self.loop._core.has_work or not self.loop.inbox.empty():
            assert self.loop._goes_on()
            turns += 1
            assert turns < 500
        self.engine.core.check_integrity()
        self.loop.inbox.put(End())
        self.loop.run()

    def events(self, ticket: int) -> list[Any]:
        return [each for reply in self.said if isinstance(reply, Events) for to, each in reply.events if to == ticket]

    def text(self, ticket: int) -> str:
        return "".join(each.text for each in self.events(ticket) if isinstance(each, Delta))


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("time", [1, 2, 3, 20])
def test_an_event_that_cannot_be_sent_ends_its_request_alone(is_whole: bool, time: int) -> None:
    """As where another process cannot be told of it."""
    times: list[None] = []

    def refuse(reply: Reply) -> None:
        if isinstance(reply, Events) and any(to == 1 and isinstance(each, Delta) for to, each in reply.events):
            times.append(None)
            if len(times) >= time:
                raise TypeError("cannot be pickled")

    rig = Rig(refuse)
    for ticket, name in enumerate(NAMES):
        rig.add(name, ticket, is_whole=is_whole)
    rig.run()
    assert (rig.text(0), rig.text(2)) == ("a" * 20, "c" * 20)
    if len(times) >= time:
        assert isinstance(rig.events(1)[-1], EngineFaultError)
        assert len([each for each in rig.events(1) if not isinstance(each, Delta)]) == 1
        assert rig.loop.metrics.reading().faults["stream"] >= 1
    assert not any(isinstance(reply, Failed) for reply in rig.said)


def test_an_answer_that_cannot_be_put_together_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    add, calls = OutputCollector.add, list[str]()

    def failing(self: OutputCollector, delta: Delta) -> None:
        calls.append(delta.request_id)
        if delta.request_id == "bad" and calls.count("bad") == 2:
            raise MemoryError
        add(self, delta)

    monkeypatch.setattr(OutputCollector, "add", failing)
    rig = Rig()
    for ticket, name in enumerate(NAMES):
        rig.add(name, ticket, is_whole=True, stop=("never",))
    rig.run()
    assert (rig.text(0), rig.text(2)) == ("a" * 20, "c" * 20)
    assert [type(each) for each in rig.events(1)] == [EngineFaultError]
    assert rig.loop.metrics.reading().faults == {"detokenizer": 1}


def test_a_scope_that_cannot_be_forgotten_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.engine.drafter, "clear_scope", lambda scope: 1 // 0)
    rig.add("a", 0)
    rig.loop.inbox.put(ClearScope(1, DraftScope("default", "team")))
    rig.run()
    assert rig.text(0) == "a" * 20
    (done,) = [reply for reply in rig.said if isinstance(reply, Done)]
    assert "'team'" in str(done.error)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("is_sound", [True, False])
def test_drafts_are_saved_and_children_closed_however_it_ends(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], is_sound: bool
) -> None:
    """But drafts are not saved by an engine that cannot be brought back to a consistent state."""

    def failing() -> None:
        rig.loop.inbox.put(End())
        raise error

    rig = Rig(draft_cache="drafts")
    monkeypatch.setattr(rig.engine.core, "step", failing)
    if not is_sound:
        monkeypatch.setattr(rig.engine.core, "check_integrity", failing)
    rig.add("a", 0)
    if issubclass(error, Exception):
        rig.loop.run()
    else:
        with pytest.raises(error):
            rig.loop.run()
    has_failed = issubclass(error, Exception) and not is_sound
    assert rig.saved == ([] if has_failed else [Path("drafts")])
    assert rig.is_closed


def test_drafts_that_cannot_be_saved_do_not_keep_children_open(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(draft_cache="drafts")
    monkeypatch.setattr(rig.loop._built, "save_drafts", lambda path: 1 // 0)
    rig.loop.inbox.put(End())
    rig.loop.run()
    assert rig.is_closed
