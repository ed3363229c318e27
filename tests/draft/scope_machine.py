"""What drafters' tests share: trees and what they owe, and a machine that plants secrets and looks for them."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from batchserve.draft.base import Drafter, DraftQuery, DraftRequest, DraftTree
from batchserve.request import DraftScope

SCOPE = DraftScope("default", "one")
OTHER_SCOPES = (DraftScope("default", "two"), DraftScope("tenant", "one"))


def check_tree(tree: DraftTree, query: DraftQuery) -> None:
    """The contract, and what ours keep beside: path probabilities fall, the likeliest sibling is first."""
    tree.check(query)
    assert len(tree.probs) == len(tree)
    last_sibling: dict[int, float] = {}
    for parent, prob in zip(tree.parents, tree.probs, strict=True):
        assert 0 < prob <= (tree.probs[parent] if parent >= 0 else 1) + 1e-9
        assert prob <= last_sibling.get(parent, 1.0) + 1e-9
        last_sibling[parent] = prob
    roots = [prob for parent, prob in zip(tree.parents, tree.probs, strict=True) if parent < 0]
    assert sum(roots) <= 1 + 1e-9


def first_chain(tree: DraftTree) -> list[int]:
    """The likeliest path: first children all the way."""
    chain, node = [], -1
    while node in tree.parents:
        node = tree.parents.index(node)
        chain.append(tree.token_ids[node])
    return chain


def say(drafter: Drafter, request_id: str, token_ids: list[int]) -> None:
    drafter.accept(request_id, token_ids)
    drafter.share(request_id, token_ids)


class ScopeMachine(RuleBasedStateMachine):
    """Requests of several scopes at once; each has prompt tokens of its own, and tokens that only its scope may see.

    A subclass makes `drafter` in an initialize rule.
    """

    SECRETS = 1000
    SCOPES = (None, SCOPE, *OTHER_SCOPES)
    drafter: Drafter

    def __init__(self) -> None:
        super().__init__()
        self.scopes: dict[str, DraftScope | None] = {}
        self.known: dict[str, set[int]] = {}  # tokens that each request was told of
        self.unshared: dict[str, list[int]] = {}
        self.shared: dict[DraftScope, set[int]] = {}
        self.started = 0

    def check_tree(self, tree: DraftTree, query: DraftQuery) -> None:
        check_tree(tree, query)

    @rule(
        public=st.lists(st.integers(0, 5), max_size=12),
        scope=st.sampled_from(SCOPES),
        has_reference=st.booleans(),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def start(self, public: list[int], scope: DraftScope | None, has_reference: bool, temperature: float) -> None:
        self.started += 1
        request_id, secret = f"r{self.started}", self.SECRETS * self.started
        prompt = [token for t in public for token in (t, secret + t)] or [secret]
        references = [[*public, secret + 8], [secret + 9, *public]] if has_reference else []
        self.drafter.start(DraftRequest(request_id, prompt, references, scope, temperature=temperature, seed=7))
        self.known[request_id] = {token for text in (prompt, *references) for token in text}
        self.unshared[request_id], self.scopes[request_id] = [], scope

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 5), min_size=1, max_size=40))
    def accept(self, data: st.DataObject, tokens: list[int]) -> None:
        """An answer may quote its own prompt's secret: then it is shared like any output, once it is published."""
        request_id = data.draw(st.sampled_from(sorted(self.known)))
        own = int(request_id[1:]) * self.SECRETS
        kind = data.draw(st.integers(0, 4))
        if kind == 0:  # all that its scope may ever be given is one token
            tokens = [own + 7] * len(tokens)
        elif kind == 1:
            tokens = [token for t in tokens for token in ((t, own + 7) if t == 0 else (t,))] + [own + 7]
        self.drafter.accept(request_id, tokens)
        self.known[request_id] |= set(tokens)
        self.unshared[request_id] += tokens

    @precondition(lambda self: any(self.unshared.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(r for r, tokens in self.unshared.items() if tokens)))
        tokens, self.unshared[request_id] = self.unshared[request_id], []
        self.drafter.share(request_id, tokens)
        scope = self.scopes[request_id]
        if scope is not None:
            self.shared.setdefault(scope, set()).update(tokens)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), max_tokens=st.integers(0, 40), max_depth=st.integers(0, 8))
    def propose(self, data: st.DataObject, max_tokens: int, max_depth: int) -> None:
        wanted = data.draw(st.lists(st.sampled_from(sorted(self.known)), min_size=1, unique=True))
        queries = [DraftQuery(request_id, max_tokens, max_depth) for request_id in wanted]
        trees = self.drafter.propose(queries)
        assert len(trees) == len(wanted)
        for query, tree in zip(queries, trees, strict=True):
            self.check_tree(tree, query)
            scope = self.scopes[query.request_id]
            shared = self.shared.get(scope, set()) if scope is not None else set()
            assert set(tree.token_ids) <= self.known[query.request_id] | shared

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.known)))
        self.drafter.end(request_id)
        del self.known[request_id], self.unshared[request_id], self.scopes[request_id]

    @rule(scope=st.sampled_from(SCOPES[1:]))
    def clear_scope(self, scope: DraftScope) -> None:
        self.drafter.clear_scope(scope)
        self.shared.pop(scope, None)

    def teardown(self) -> None:
        for request_id in self.known:
            self.drafter.end(request_id)
        if hasattr(self, "drafter"):
            assert not self.drafter._requests  # type: ignore[attr-defined]
