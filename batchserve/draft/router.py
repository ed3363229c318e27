"""Several drafters as one: each request is drafted by the one that it has chosen."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree, NullDrafter
from batchserve.draft.forest import DraftForest, DraftQueries
from batchserve.errors import ConfigError
from batchserve.native.compile_progress import Part, compile_parts
from batchserve.request import DraftScope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchserve.draft.kernels import KernelLoader
    from batchserve.native.pool import Team

USUAL_DRAFTER_S, USUAL_SHARED_S = 20.0, 10.0  # of compiling


@runtime_checkable
class PersistentDrafter(Protocol):
    """A drafter whose shared texts outlive the process. `fingerprint` names the vocabulary that token ids are of."""

    def num_tokens(self) -> int:
        """How many are shared, with those that stand between two texts."""

    def save(self, path: Path, fingerprint: str) -> None:
        """Write what is shared, replacing the file whole. Raises OSError."""

    def load(self, path: Path, fingerprint: str, vocab_size: int) -> None:
        """Take over what was saved. Raises ConfigError for a file that is corrupt, or of another vocabulary."""


def drafter_modules(drafter: Drafter, shared: Sequence[str]) -> tuple[str, ...]:
    """Modules whose kernels a drafter needs; shared: those that any drafts need."""
    own = type(drafter).__module__
    return (own,) if isinstance(drafter, NullDrafter) else (own, *shared)


class RoutingDrafter(Drafter):
    """The drafters of one engine by name; `default` is that of requests that name none.

    A drafter's kernels are prepared when it is first asked whether it is ready; `shared` are modules whose kernels are
    needed for what is done with any drafts.
    """

    def __init__(
        self, default: str, drafters: Mapping[str, Drafter], kernels: KernelLoader, shared: Sequence[str] = ()
    ) -> None:
        self._default = default
        self._drafters = dict(drafters)
        self._kernels = kernels
        self._shared = tuple(shared)
        self._chosen: dict[str, Drafter] = {}  # by request id
        self._used: dict[str, Drafter] = {}  # by name; the others have no state, and may not be ready

    @property
    def name(self) -> str:
        return self._default

    def is_ready_for(self, drafter: str) -> bool:
        name = drafter or self.name
        modules = self._modules(self._drafters[name])
        # Not all(): each is begun when it is first asked for, so that they are prepared side by side.
        is_ready = False not in [self._kernels.is_ready(module) for module in modules]
        if not is_ready:
            self._kernels.announce(name, modules)
        return is_ready

    def prepare(self, say: Callable[[str], None] = lambda message: None) -> None:
        """Make the default drafter ready in the calling thread. Raises ConfigError."""
        modules = self._modules(self._drafters[self.name])
        # The drafter's own are the most, and come last.
        usual_s = [USUAL_DRAFTER_S, *[USUAL_SHARED_S] * (len(modules) - 1)]
        parts = [
            Part(module.rpartition(".")[2].replace("_", " "), each_s, partial(self._kernels.prepare, module))
            for module, each_s in zip(modules, usual_s, strict=True)
        ]
        compile_parts(parts[::-1], say)

    def _modules(self, drafter: Drafter) -> tuple[str, ...]:
        return drafter_modules(drafter, self._shared)

    def start(self, request: DraftRequest) -> None:
        if request.request_id in self._chosen:
            raise ValueError(f"request {request.request_id!r} has draft state already")
        drafter = self._use(request.drafter or self.name)
        drafter.start(request)
        self._chosen[request.request_id] = drafter

    def _use(self, name: str) -> Drafter:
        return self._used.setdefault(name, self._drafters[name])

    def propose(self, queries: Sequence[DraftQuery]) -> list[DraftTree]:
        return self.propose_all(DraftQueries.of(queries)).trees()

    def propose_all(self, queries: DraftQueries) -> DraftForest:
        """One call to each drafter that is concerned."""
        places: dict[Drafter, list[int]] = {}
        for place, request_id in enumerate(queries.request_ids):
            places.setdefault(self._chosen[request_id], []).append(place)
        if len(places) == 1:
            return next(iter(places)).propose_all(queries)
        return DraftForest.merged([(mine, drafter.propose_all(queries.at(mine))) for drafter, mine in places.items()])

    def observe(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._chosen[request_id].observe(request_id, token_ids)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._chosen[request_id].accept(request_id, token_ids)

    def accept_all(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        for drafter, those in self._by_drafter(token_ids).items():
            drafter.accept_all(those)

    def catch_up(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        for drafter, those in self._by_drafter(token_ids).items():
            drafter.catch_up(those)

    def _by_drafter(self, token_ids: Mapping[str, Sequence[int]]) -> Mapping[Drafter, Mapping[str, Sequence[int]]]:
        chosen = self._chosen
        concerned = {chosen[request_id] for request_id in token_ids}
        if len(concerned) == 1:
            return {concerned.pop(): token_ids}
        mine: dict[Drafter, dict[str, Sequence[int]]] = {}
        for request_id, tokens in token_ids.items():
            mine.setdefault(chosen[request_id], {})[request_id] = tokens
        return mine

    def window_tokens(self, request_id: str) -> int:
        return self._chosen[request_id].window_tokens(request_id)

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._chosen[request_id].share(request_id, token_ids)

    def share_all(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        for drafter, those in self._by_drafter(token_ids).items():
            drafter.share_all(those)

    def end(self, request_id: str) -> None:
        self._chosen.pop(request_id).end(request_id)

    def clear_scope(self, scope: DraftScope) -> None:
        errors = []
        for drafter in self._used.values():
            try:
                drafter.clear_scope(scope)
            except Exception as error:  # the others forget it all the same
                errors.append(error)
        if errors:
            raise errors[0]

    def use_threads(self, team: Team) -> None:
        for drafter in self._drafters.values():
            drafter.use_threads(team)

    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes() for drafter in self._used.values())

    def persistent(self) -> PersistentDrafter:
        """The default drafter, if it can be saved and loaded. Raises ConfigError."""
        drafter = self._drafters[self.name]
        if not isinstance(drafter, PersistentDrafter):
            able = [name for name, each in self._drafters.items() if isinstance(each, PersistentDrafter)]
            those = f"; {' and '.join(able)} can" if able else ""
            raise ConfigError(f"drafter = {self.name!r}: what it shares cannot be saved or loaded{those}")
        return drafter

    def load(self, path: Path, fingerprint: str, vocab_size: int) -> None:
        """Into the default drafter, which must be ready. Raises ConfigError."""
        store = self.persistent()
        self._use(self.name)
        store.load(path, fingerprint, vocab_size)

    def save(self, path: Path, fingerprint: str) -> None:
        """What the default drafter shares, if it was used at all. Raises ConfigError, OSError."""
        store = self.persistent()
        if self.name in self._used:
            store.save(path, fingerprint)

    def close(self) -> None:
        self._kernels.close()
        for drafter in self._drafters.values():
            drafter.close()
