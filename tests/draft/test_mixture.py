"""The mixture drafter: trees from real repetition, scopes that never meet, bounded memory, safe files."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from batchserve.draft import draft_cache, mixture_noise
from batchserve.draft.base import DraftQuery, DraftRequest, DraftTree
from batchserve.draft.mixture import MIN_SCOPE_BYTES, SCOPE_BYTES, SHARED_AT_ONCE, MixtureDrafter
from batchserve.draft.mixture_kernels import count_common, initial_weights, make_common
from batchserve.draft.mixture_learning import RIPE
from batchserve.draft.text_index import BYTES_PER_TOKEN, MIN_CAPACITY
from batchserve.errors import ConfigError
from batchserve.request import DraftScope
from batchserve.sampling import draw_kernel, noise
from tests.draft.scope_machine import OTHER_SCOPES, SCOPE, ScopeMachine, check_tree, first_chain, say
from tests.factories import examples

VOCAB_SIZE = 100
PATTERN = [11, 12, 13, 14, 15, 16, 17, 18]
OTHER = OTHER_SCOPES[0]


def check_mixture(tree: DraftTree, query: DraftQuery) -> None:
    """What every tree owes, and that children of one node share at most all of its probability."""
    check_tree(tree, query)
    given: dict[int, float] = {}
    for parent, prob in zip(tree.parents, tree.probs, strict=True):
        given[parent] = given.get(parent, 0.0) + prob
    for parent, total in given.items():
        assert total <= (tree.probs[parent] if parent >= 0 else 1.0) + 1e-9


def propose(drafter: MixtureDrafter, request_id: str, max_tokens: int = 8, max_depth: int = 8) -> DraftTree:
    query = DraftQuery(request_id, max_tokens, max_depth)
    (tree,) = drafter.propose([query])
    check_mixture(tree, query)
    return tree


def has_path(tree: DraftTree, token_ids: list[int]) -> bool:
    """Whether the tokens are drafted, each behind the one before."""
    node = -1
    for token in token_ids:
        found = [i for i, p in enumerate(tree.parents) if p == node and tree.token_ids[i] == token]
        if not found:
            return False
        (node,) = found
    return True


class MixtureMachine(ScopeMachine):
    """With tight bounds and the default ones; and what is saved and loaded is the same."""

    folder = "."

    @initialize(is_tight=st.booleans())
    def begin(self, is_tight: bool) -> None:
        self.options = {"max_scope_bytes": MIN_SCOPE_BYTES, "max_total_bytes": 2 * MIN_SCOPE_BYTES} if is_tight else {}
        self.drafter = MixtureDrafter(**self.options)

    def check_tree(self, tree: DraftTree, query: DraftQuery) -> None:
        check_mixture(tree, query)

    @invariant()
    def scopes_are_counted(self) -> None:
        assert self.drafter._scope_bytes == sum(scope.nbytes for scope in self.drafter._scopes.values())

    @precondition(lambda self: not self.known)
    @rule()
    def restart(self) -> None:
        path = Path(self.folder) / "drafts"
        self.drafter.save(path, "tokenizer")
        self.drafter = MixtureDrafter(**self.options)
        self.drafter.load(path, "tokenizer", 1 << 16)

    def teardown(self) -> None:
        super().teardown()
        if getattr(self, "options", {}):  # with nobody running, only the bounded scopes are left
            assert self.drafter.memory_bytes() <= 2 * MIN_SCOPE_BYTES + len(self.SCOPES) * MIN_SCOPE_BYTES


@pytest.mark.usefixtures("in_tmp_path")
class TestMixture(MixtureMachine.TestCase):
    settings = examples(60, stateful_step_count=30)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixtureMachine, "folder", str(tmp_path))


def test_repeated_text_of_the_prompt_is_found() -> None:
    drafter = MixtureDrafter()
    drafter.start(DraftRequest("a", [*PATTERN, 90, 91, 92, *PATTERN[:3]]))
    assert first_chain(propose(drafter, "a", 5)) == PATTERN[3:8]


def test_a_copy_ends_where_the_prompt_does() -> None:
    """What comes behind it there is how the answer began, which nobody goes on with; elsewhere copies run on."""
    drafter = MixtureDrafter()
    drafter.start(DraftRequest("a", [90, *PATTERN]))
    drafter.accept("a", [70, 71, 72, *PATTERN[:4]])
    assert first_chain(propose(drafter, "a", 6)) == PATTERN[4:]
    drafter.accept("a", PATTERN[4:])
    assert not {70, 71} & set(propose(drafter, "a", 8).token_ids)
    drafter.accept("a", [80, 71])  # both were in the answer, behind each other's like
    assert first_chain(propose(drafter, "a", 1)) == [72]


def test_references_are_drafted_though_the_model_does_not_read_them() -> None:
    drafter = MixtureDrafter()
    drafter.start(DraftRequest("a", [1, *PATTERN[:2]], [[5, *PATTERN], [6, 7]]))
    assert first_chain(propose(drafter, "a", 6))[:6] == PATTERN[2:]


def test_an_answer_is_drafted_from_its_own_text_at_once() -> None:
    drafter = MixtureDrafter()
    drafter.start(DraftRequest("a", [1]))
    drafter.accept("a", PATTERN)
    drafter.accept("a", [50])
    drafter.accept("a", PATTERN[:2])
    assert first_chain(propose(drafter, "a", 6)) == PATTERN[2:]


def test_outputs_reach_others_of_the_scope_once_they_are_shared_and_nobody_else() -> None:
    drafter = MixtureDrafter()
    for request_id, key in (("a", SCOPE), ("b", SCOPE), ("c", OTHER), ("d", None), ("e", DraftScope("x", "one"))):
        drafter.start(DraftRequest(request_id, [*PATTERN[:2]], scope=key))
    drafter.accept("a", PATTERN * 5)
    assert len(propose(drafter, "b")) == 0  # not published: the client may never see these tokens
    drafter.share("a", PATTERN * 5)
    for request_id in "bcde":
        drafter.accept(request_id, PATTERN[:2])
    assert has_path(propose(drafter, "b", 24), PATTERN[2:])
    assert [set(propose(drafter, r).token_ids) - set(PATTERN[:2]) for r in "cde"] == [set()] * 3
    drafter.end("a")
    assert has_path(propose(drafter, "b", 24), PATTERN[2:])  # shared text outlives its request


def test_a_short_answer_is_shared_at_its_end_and_found_from_its_first_token() -> None:
    drafter = MixtureDrafter()
    assert len(PATTERN) < SHARED_AT_ONCE
    drafter.start(DraftRequest("a", [1, 2], scope=SCOPE))
    say(drafter, "a", PATTERN)
    drafter.end("a")
    drafter.start(DraftRequest("b", [3, 4], scope=SCOPE))
    assert first_chain(propose(drafter, "b", 64))[:2] == PATTERN[:2]  # nothing but the beginning is alike


def test_texts_of_two_requests_in_turn_are_each_found_whole() -> None:
    """Pieces of several answers alternate in the scope; a match may begin in one piece and go on in the next."""
    drafter, rng = MixtureDrafter(), random.Random(1)
    tokens = rng.sample(range(1000), 800)
    texts = {"a": tokens[:400], "b": tokens[400:]}
    for request_id in "ab":
        drafter.start(DraftRequest(request_id, [0], scope=SCOPE))
    for at in range(0, 400, 5):
        for request_id in "ab":
            say(drafter, request_id, texts[request_id][at : at + 5])
    for request_id in "ab":
        drafter.end(request_id)
    right = 0
    for request_id in "ab":
        drafter.start(DraftRequest("new", [0], scope=SCOPE))
        for token, following in zip(texts[request_id], texts[request_id][1:], strict=False):
            drafter.accept("new", [token])
            right += first_chain(propose(drafter, "new", 4))[:1] == [following]
        drafter.end("new")
    assert right == 798


def test_the_likelier_of_two_continuations_comes_first_and_both_are_drafted() -> None:
    drafter = MixtureDrafter()
    often, seldom = [21, 22, 23], [31, 32, 33]
    texts = [often, seldom, often, seldom, often]
    prompt = [*(token for i, text in enumerate(texts) for token in (100 + i, 9, *text)), 200, 9]
    drafter.start(DraftRequest("a", prompt))
    tree = propose(drafter, "a", 12)
    assert tree.token_ids[0] == 21
    assert 31 in [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent < 0]
    assert tree.probs[0] > 1.3 * tree.probs[tree.token_ids.index(31)]


def test_a_long_copy_is_drafted_as_far_as_there_are_rows() -> None:
    drafter = MixtureDrafter()
    text = list(range(100, 300))
    drafter.start(DraftRequest("a", [*text, 7, *text[:40]]))
    drafter.accept("a", text[40:60])  # what was copied so far came true
    assert has_path(propose(drafter, "a", 64, 64), text[60:124])


def test_an_earlier_habit_is_not_forgotten_for_many_later_exceptions() -> None:
    drafter, context, usual = MixtureDrafter(), 5, 6
    earlier = [token for i in range(56) for token in (1000 + i, context, usual)]
    later = [token for i in range(66) for token in (2000 + i, context, 3000 + i)]
    drafter.start(DraftRequest("a", [*earlier, *later, 9, context]))
    tree = propose(drafter, "a", 16, 1)
    assert tree.token_ids[0] == usual, "more than the latest 64 occurrences are looked at where the tree begins"


def test_what_will_not_be_run_is_not_drafted() -> None:
    """And what will be run is drafted as ever, but for a little that experts would add who need not be asked then."""
    drafter, rng = MixtureDrafter(), random.Random(6)
    drafter.start(DraftRequest("a", [rng.randrange(6) for _ in range(300)], scope=SCOPE))

    def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
        found: list[tuple[int, ...]] = []
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return dict(zip(found, tree.probs, strict=True))

    whole = paths(propose(drafter, "a", 64))
    for least in (0.01, 0.03, 0.1):
        (tree,) = drafter.propose([DraftQuery("a", 64, 8, min_prob=least)])
        cut = paths(tree)
        assert 0 < len(cut) < len(whole)
        assert all(prob >= least for prob in cut.values())
        for path, prob in whole.items():
            assert prob < 1.5 * least or cut[path] == pytest.approx(prob, rel=0.1)


def test_probabilities_are_calibrated_after_some_learning() -> None:
    """Where the text follows known chances, the promised number of accepted first tokens is what is accepted."""
    rng, drafter = random.Random(5), MixtureDrafter()
    follow = {t: [rng.randrange(40) for _ in range(3)] for t in range(40)}
    drafter.start(DraftRequest("a", [0], scope=SCOPE))
    token, promised, accepted, steps = 0, 0.0, 0, 0
    for step in range(3000):
        token = follow[token][rng.choices(range(3), (0.7, 0.2, 0.1))[0]]
        if step >= 1000:
            tree = propose(drafter, "a", 4, 1)
            promised += sum(tree.probs)
            accepted += token in tree.token_ids
            steps += 1
        say(drafter, "a", [token])
    assert accepted > 0.85 * steps
    assert abs(promised - accepted) < 0.05 * steps


def test_weights_that_have_settled_are_learned_from_less_and_every_token_is_still_drafted() -> None:
    learned = []
    for num_tokens in (64, RIPE):  # each moves one weight at least, and less than RIPE / 64
        drafter = MixtureDrafter()
        drafter.start(DraftRequest("before", [1], scope=SCOPE))
        say(drafter, "before", PATTERN * (num_tokens // len(PATTERN)))
        drafter.start(DraftRequest("r", [1, 2, 3], scope=SCOPE))
        drafter.accept("r", PATTERN[:4])
        propose(drafter, "r")
        seen = drafter._scopes[SCOPE].experience.seen
        before = int(seen.sum())
        drafter.accept("r", [*PATTERN[4:], 61, 62, 63])
        learned.append(int(seen.sum()) - before)
        drafter.accept("r", [*PATTERN, 61])
        assert has_path(propose(drafter, "r"), [62, 63]), "what is only in its own text"
    assert 0 < learned[1] < learned[0] / 2, learned


def test_the_samplers_noise_is_the_same_here() -> None:
    tokens = np.arange(0, 5000, 7)
    for seed, position in ((0, 0), (2**64 - 1, 5), (12345, 4095)):
        key = draw_kernel.stream_key(np.uint64(seed), position)
        assert int(key) == noise.stream_key(seed, position)
        mine = [mixture_noise.gumbel(np.uint64(key), token) for token in tokens]
        np.testing.assert_allclose(mine, noise.gumbel(int(key), tokens), rtol=1e-12)


def test_under_sampling_drafts_follow_the_noise() -> None:
    """Tokens drawn as the sampler draws them, from a known distribution: the first draft is right more often."""

    def share_right(temperature: float, seed: int) -> float:
        rng, drafter = np.random.default_rng(3), MixtureDrafter()
        logits = np.log(rng.dirichlet(np.full(12, 0.5), size=20))
        drafter.start(DraftRequest("a", [0], temperature=temperature, seed=seed))
        token, right = 0, 0
        for position in range(1, 2500):
            scores = logits[token % 20] + noise.gumbel(noise.stream_key(9, position), np.arange(12))
            token = int(scores.argmax())
            if position > 1000:
                right += propose(drafter, "a", 1, 1).token_ids[:1] == [token]
            drafter.accept("a", [token])
        return right / 1499

    plain, with_noise, with_other_noise = share_right(0.0, 9), share_right(1.0, 9), share_right(1.0, 8)
    assert with_noise > plain + 0.15
    assert abs(with_other_noise - plain) < 0.05  # it learns that this noise decides nothing


def test_common_tokens_are_tracked_in_bounded_memory() -> None:
    rng, common = random.Random(2), make_common()
    population = [*([1] * 50), *([2] * 30), *range(100, 2000)]
    drawn = [rng.choice(population) for _ in range(20_000)]
    count_common(common, np.array(drawn, np.int32))
    assert common[0][:2].tolist() == [1, 2]
    assert common[2][1] == 20_000
    assert (np.diff(common[1]) <= 0).all()


def test_memory_is_bounded_and_the_newest_text_stays() -> None:
    drafter = MixtureDrafter(max_scope_bytes=MIN_SCOPE_BYTES, max_total_bytes=4 * MIN_SCOPE_BYTES)
    rng = random.Random(0)
    for i in range(40):
        key = DraftScope("default", f"scope {i % 7}")
        drafter.start(DraftRequest("a", [0], scope=key))
        say(drafter, "a", [rng.randrange(500) for _ in range(900)] + PATTERN)
        drafter.end("a")
        assert drafter.memory_bytes() <= 4 * MIN_SCOPE_BYTES
    drafter.start(DraftRequest("b", PATTERN[:2], scope=key))
    drafter.accept("b", PATTERN[:2])
    assert has_path(propose(drafter, "b", 64), PATTERN[2:4])


def filled(drafter: MixtureDrafter, name: str, num_tokens: int) -> None:
    """A scope that nobody uses any more."""
    rng = random.Random(name)
    drafter.start(DraftRequest(name, [0], scope=DraftScope("default", name)))
    for _ in range(0, num_tokens, 32):
        say(drafter, name, [rng.randrange(500) for _ in range(32)])
    drafter.end(name)


@pytest.mark.parametrize("scope", [None, OTHER])
def test_the_only_token_that_a_scope_was_given_stays_there(scope: DraftScope | None) -> None:
    """Where nothing matches, all there is to say of the next token is how frequent it is."""
    drafter = MixtureDrafter()
    drafter.start(DraftRequest("first", [5, 6], scope=SCOPE))
    say(drafter, "first", [77])
    drafter.end("first")
    drafter.start(DraftRequest("other", [1, 2, 3, 4], scope=scope))
    assert propose(drafter, "other").token_ids == []
    drafter.start(DraftRequest("second", [7, 8, 9], scope=SCOPE))
    drafter.accept("second", [10])
    drafter.accept("second", [11])
    assert propose(drafter, "other").token_ids == []
    assert set(propose(drafter, "second").token_ids) == {77}


def test_a_scope_that_cannot_grow_costs_others_nothing(tmp_path: Path) -> None:
    """Nor is it cut to its beginning when it is loaded: it has what the bound leaves."""
    bound = 5 * MIN_CAPACITY * BYTES_PER_TOKEN + 2 * SCOPE_BYTES
    live = MixtureDrafter(max_total_bytes=bound)
    filled(live, "large", 4 * MIN_CAPACITY)
    filled(live, "small", 64)
    filled(live, "large", MIN_CAPACITY)
    assert [key.name for key in live._scopes] == ["small", "large"]
    whole, bounded = MixtureDrafter(), MixtureDrafter(max_total_bytes=bound)
    filled(whole, "large", 12 * MIN_CAPACITY)
    whole.save(tmp_path / "large", "fingerprint")
    bounded.load(tmp_path / "large", "fingerprint", 500)
    (scope,), (all_of_it,) = bounded._scopes.values(), whole._scopes.values()
    assert 4 * MIN_CAPACITY < len(scope.index) < 6 * MIN_CAPACITY
    assert scope.index.tokens().tolist() == all_of_it.index.tokens()[-len(scope.index) :].tolist()
    assert bounded.memory_bytes() <= bound


def test_clearing_a_scope_takes_effect_for_requests_in_flight() -> None:
    drafter = MixtureDrafter()
    for request_id in "ab":
        drafter.start(DraftRequest(request_id, [1], scope=SCOPE))
    say(drafter, "a", [*PATTERN * 5, 900])
    say(drafter, "a", [901, 902])  # waits to be written
    drafter.clear_scope(SCOPE)
    drafter.clear_scope(OTHER)
    drafter.accept("b", PATTERN[:2])
    assert set(propose(drafter, "b", 64).token_ids) <= set(PATTERN[:2])
    drafter.end("a")
    drafter.accept("b", [901])
    assert 902 not in propose(drafter, "b", 64).token_ids
    say(drafter, "b", [7] * 40)
    drafter.end("b")
    assert drafter.memory_bytes() > 0  # what is said after the clearing is kept


@pytest.mark.parametrize("name", ["max_scope_bytes", "max_total_bytes"])
def test_bounds_too_small_for_anything_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 5: must be at least"):
        MixtureDrafter(**{name: 5})  # type: ignore[arg-type]


def warmed() -> MixtureDrafter:
    drafter = MixtureDrafter()
    for key in (SCOPE, OTHER):
        drafter.start(DraftRequest("a", [1], scope=key))
        say(drafter, "a", [*PATTERN * 5, 70 if key is SCOPE else 80])
        drafter.end("a")
    return drafter


def test_a_saved_drafter_drafts_the_same(tmp_path: Path) -> None:
    before, after = warmed(), MixtureDrafter()
    before.save(tmp_path / "drafts", "fingerprint")
    after.load(tmp_path / "drafts", "fingerprint", VOCAB_SIZE)
    assert [path.name for path in tmp_path.iterdir()] == ["drafts"]
    for key, mine, others in ((SCOPE, 70, 80), (OTHER, 80, 70)):
        trees = []
        for drafter in (before, after):
            drafter.start(DraftRequest("b", [3], scope=key))
            drafter.accept("b", PATTERN)
            trees.append(propose(drafter, "b", 32))
            drafter.end("b")
        assert trees[0] == trees[1]
        assert mine in trees[1].token_ids
        assert others not in trees[1].token_ids


class Claiming(NamedTuple):
    """An array of so many tokens, as it says, and of two, as it has."""

    size: int

    def bytes(self) -> bytes:
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (self.size,)})
        return file.getvalue() + bytes(8)


def _archive(path: Path, name: str) -> None:
    """Nothing but one member that is no array."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "{}")


def _rewrite(path: Path, save: Any = np.savez, **changes: Any) -> None:
    """Save the same file with other arrays, or other entries of its header."""
    with np.load(path) as arrays:
        content = dict(arrays)
    header = json.loads(content["header"].tobytes())
    header.update({name: value for name, value in changes.items() if name not in content})
    content["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    content.update({name: value for name, value in changes.items() if name in content})
    claimed = {name: content.pop(name) for name, value in changes.items() if isinstance(value, Claiming)}
    with path.open("wb") as file:
        save(file, **content)
    with zipfile.ZipFile(path, "a") as archive:
        for name, claiming in claimed.items():
            archive.writestr(f"{name}.npy", claiming.bytes())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-200]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"'shape': (", b"'shape': )")), "damaged"),
        (lambda path: path.write_bytes(b"no archive at all"), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: _archive(path, "header"), "damaged"),
        (lambda path: _archive(path, "header.npy"), "damaged"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "damaged"),
        (lambda path: _rewrite(path, text0=np.array([{}])), "damaged"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: _rewrite(path, fingerprint="another"), "another tokenizer"),
        (lambda path: _rewrite(path, version=2), "version 2"),
        (lambda path: _rewrite(path, scopes=[["default", "one"]] * 5), "damaged"),
        (lambda path: _rewrite(path, text0=np.array([1, -7], np.int32)), "damaged"),
        (lambda path: _rewrite(path, text0=np.array([VOCAB_SIZE - 1, VOCAB_SIZE], np.int32)), "damaged"),
        (lambda path: _rewrite(path, text0=np.array([1.5])), "damaged"),
        (lambda path: _rewrite(path, weights0=np.full(initial_weights().shape, np.nan)), "damaged"),
        (lambda path: _rewrite(path, weights0=np.zeros(3)), "damaged"),
        (lambda path: _rewrite(path, seen0=np.zeros(3, np.int64)), "damaged"),
        (lambda path: _rewrite(path, seen0=np.full(initial_weights().shape, -12)), "damaged"),
        (lambda path: _rewrite(path, scopes=[["default", {}], ["default", "two"]]), "damaged"),
        (lambda path: _rewrite(path, scopes=[["default", None], ["default", "two"]]), "damaged"),
        (lambda path: _rewrite(path, header=np.frombuffer(b"[" * 50_000, np.uint8)), "damaged"),
        (lambda path: _rewrite(path, header=np.frombuffer(b"5", np.uint8)), "damaged"),
        (lambda path: _rewrite(path, seen0=np.full(initial_weights().shape, 1 << 62)), "damaged"),
        (lambda path: _rewrite(path, text0=Claiming(1 << 60)), "damaged"),
        (lambda path: _rewrite(path, text0=Claiming(1 << 70)), "damaged"),
        (lambda path: _rewrite(path, save=np.savez_compressed), "damaged"),
        (lambda path: path.write_bytes(Claiming(2).bytes()), "damaged"),
        (lambda path: _rewrite(path, text0=np.zeros(MIN_SCOPE_BYTES, np.int32)), "may keep"),
        (lambda path: (path.unlink(), path.mkdir()), "not a file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a file"),
    ],
)
def test_files_that_are_not_ours_are_refused_by_name(tmp_path: Path, damage: Any, reason: str) -> None:
    path = tmp_path / "drafts"
    warmed().save(path, "fingerprint")
    damage(path)
    drafter = MixtureDrafter(max_scope_bytes=MIN_SCOPE_BYTES, max_total_bytes=2 * MIN_SCOPE_BYTES)
    with pytest.raises(ConfigError, match=f"draft_cache = .*drafts.*{reason}"):
        drafter.load(path, "fingerprint", VOCAB_SIZE)
    assert drafter.memory_bytes() == 0


def test_a_header_that_would_take_many_times_its_size_to_read_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "drafts"
    warmed().save(path, "fingerprint")
    monkeypatch.setattr(draft_cache, "MAX_HEADER_BYTES", 100)
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("read"))
    with pytest.raises(ConfigError, match="damaged"):
        MixtureDrafter().load(path, "fingerprint", VOCAB_SIZE)


def test_drafts_are_saved_under_the_longest_names_that_files_have(tmp_path: Path) -> None:
    path, drafter, loaded = tmp_path / ("\N{GREEK SMALL LETTER LAMDA}" * 127), warmed(), MixtureDrafter()
    drafter.save(path, "fingerprint")
    assert [*tmp_path.iterdir()] == [path]
    loaded.load(path, "fingerprint", VOCAB_SIZE)
    for each in (drafter, loaded):
        each.start(DraftRequest("again", [1, 2, 3], scope=SCOPE))
    assert propose(loaded, "again") == propose(drafter, "again")
    assert len(propose(loaded, "again"))


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "drafts"
    warmed().save(path, "fingerprint")
    whole = bytearray(path.read_bytes())
    at = whole.index(np.array(PATTERN, np.int32).tobytes())
    whole[at] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match="damaged"):
        MixtureDrafter().load(path, "fingerprint", VOCAB_SIZE)


def test_what_a_smaller_scope_has_no_room_for_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = MixtureDrafter()
    large.start(DraftRequest("a", [1], scope=SCOPE))
    answer = [1 + i % 60 for i in range(MIN_CAPACITY + 500)]
    say(large, "a", answer)
    large.end("a")
    large.save(tmp_path / "drafts", "fingerprint")
    large.load(tmp_path / "drafts", "fingerprint", VOCAB_SIZE)
    assert not caplog.records
    small = MixtureDrafter(max_scope_bytes=MIN_SCOPE_BYTES)
    small.load(tmp_path / "drafts", "fingerprint", VOCAB_SIZE)
    assert f"leave room for {MIN_CAPACITY} of {len(answer) + 2} tokens" in caplog.text  # two mark its ends
    assert small._scopes[SCOPE].index.tokens()[-501:-1].tolist() == answer[-500:]


def test_saving_goes_where_a_link_leads_and_leaves_nothing_else(tmp_path: Path) -> None:
    """Whatever lies at a name that could be guessed; and nobody else may read what the callers were answered."""
    (tmp_path / "elsewhere").mkdir()
    path, real, other = tmp_path / "drafts", tmp_path / "elsewhere" / "real", tmp_path / "other"
    other.write_text("precious")
    path.symlink_to(real)
    for folder in (tmp_path, real.parent):
        for name in ("drafts.partial", "real.partial"):
            (folder / name).symlink_to(other)
    warmed().save(path, "fingerprint")
    MixtureDrafter().load(path, "fingerprint", VOCAB_SIZE)
    assert path.is_symlink()
    assert other.read_text() == "precious"
    assert real.stat().st_mode & 0o077 == 0
    assert sorted(each.name for each in real.parent.iterdir()) == ["drafts.partial", "real", "real.partial"]


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(file: Any, **arrays: Any) -> None:
        file.write(b"the beginning")
        raise OSError(28, "No space left on device")

    path = tmp_path / "drafts"
    warmed().save(path, "fingerprint")
    monkeypatch.setattr(np, "savez", fill_up)
    with pytest.raises(OSError, match="No space"):
        MixtureDrafter().save(path, "fingerprint")
    assert [each.name for each in tmp_path.iterdir()] == ["drafts"]
    MixtureDrafter().load(path, "fingerprint", VOCAB_SIZE)
