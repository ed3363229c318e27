"""The Jacobi drafter against a plain simulation of the paper's algorithm that knows positions, but no columns."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.draft.base import DraftQuery, DraftRequest, DraftTree
from batchserve.draft.jacobi import JacobiDrafter, compile_kernels
from batchserve.draft.jacobi_kernels import insert_gram
from batchserve.errors import ConfigError
from batchserve.sampling.verify import walk_tree
from tests.factories import examples

NextToken = Callable[[list[int]], int]
WIDE = 10_000  # a budget that never binds


def high_entropy(tokens: list[int]) -> int:
    """Depends on every token of its context, and practically never says the same twice."""
    return zlib.crc32(np.array(tokens, np.int64).tobytes()) % 1_000_003


def low_entropy(tokens: list[int]) -> int:
    """A few phrases that follow each other: the next token is mostly the successor of the last."""
    last = tokens[-1] % 24
    return last + 1 if last % 6 < 5 else 6 * (len(tokens) // 6 % 4)


def moody(tokens: list[int]) -> int:
    """In between: a small vocabulary, and the last two tokens count."""
    return (7 * tokens[-1] + 3 * (tokens[-2] if len(tokens) > 1 else 0) + 1) % 11


@dataclass
class Paper:
    """Lookahead Decoding (sections 3.1 and 3.2) by absolute positions, with a call of the model for every token.

    levels[l][p] is the token at position p in the l-th iteration of the window; None where it was filled in at random
    and has not been seen yet. True ones came from the model.
    """

    model: NextToken
    text: list[int]
    window: int
    ngram: int
    guesses: int
    levels: list[dict[int, int | None]] = field(default_factory=list)
    true: list[set[int]] = field(default_factory=list)
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    following: dict[int, int] = field(default_factory=dict)  # by column: the next tokens of the last step
    height: int = 1

    def __post_init__(self) -> None:
        self.levels, self.true = [{} for _ in range(self.ngram - 1)], [set() for _ in range(self.ngram - 1)]

    @property
    def last(self) -> int:
        return len(self.text) - 1

    @property
    def width(self) -> int:
        """W columns, and one more for each level that is still missing."""
        return self.window + self.ngram - 1 - self.height

    def trajectory(self, column: int, height: int) -> list[int | None]:
        """Tokens behind the request's last one that the row of this column at level height - 1 sees."""
        base = [self.levels[0].get(self.last + j) for j in range(1, column + 1)]
        return base + [self.levels[level].get(self.last + column + level) for level in range(1, height)]

    def check_rows(self, tree: DraftTree, query: DraftQuery) -> int:
        """Hold the tree's unverified rows against the window; random fillers are learned from it. Returns columns."""
        rows = [node for node in range(len(tree)) if not tree.is_verified[node]]
        columns = (len(rows) + 1) // self.height
        assert columns * self.height == len(rows) + 1 or not rows, "no whole columns"
        depth_bound = query.max_row_depth - self.height + 2
        fitting = min(self.width, depth_bound, (query.max_tokens - tree.num_verified + 1) // self.height)
        assert columns == fitting if rows else fitting * self.height <= 1
        places = [(level, j) for level in range(self.height) for j in range(columns) if (level, j) != (0, 0)]
        for node, (level, j) in zip(rows, places if rows else [], strict=True):
            seen = path(tree, node)
            position = self.last + j + level
            if self.levels[level].get(position) is None:
                assert position not in self.true[level]
                assert seen[-1] in self.text, "a filler that is no token of the text"
                self.levels[level][position] = seen[-1]
            assert seen == self.trajectory(j, level + 1)
        return columns if rows else 0

    def observe(self, columns: int) -> None:
        for j in range(columns):
            if self.height > 1 or j > 0:  # the row of the last token itself is verified, not observed
                context = self.text + [token for token in self.trajectory(j, self.height) if token is not None]
                self.following[j] = self.model(context)

    def accept(self, token_ids: list[int]) -> None:
        """All tokens keep their positions; full trajectories lose their oldest token, others gain a level."""
        full = self.height == self.ngram - 1
        if full:
            for j in sorted(self.following, reverse=True):
                self._collect(j)
        old, old_true, old_last, old_width = self.levels, self.true, self.last, self.width
        columns = max(self.following) + 1 if self.following else 0
        old_height, drop = self.height, int(full)
        if columns and not full:
            self.height += 1
        self.text += token_ids
        self.levels, self.true = [{} for _ in old], [set() for _ in old]
        for level in range(self.height):
            for p in range(self.last + level, self.last + level + self.width):
                grown = p - old_last - level - drop  # the column that this position was in, one level up
                moved = p - old_last - level
                if columns and grown < columns:
                    if level + drop == old_height:
                        self.levels[level][p] = self.following.get(grown)
                        self.true[level].add(p)
                    else:
                        self._take(level, p, old[level + drop], old_true[level + drop])
                elif moved < old_width and level < old_height:
                    self._take(level, p, old[level], old_true[level])
        self.following = {}

    def _take(self, level: int, position: int, tokens: dict[int, int | None], true: set[int]) -> None:
        self.levels[level][position] = tokens.get(position)
        if position in true:
            self.true[level].add(position)

    def _collect(self, column: int) -> None:
        positions = [self.last + column + level for level in range(self.ngram - 1)]
        if any(p not in self.true[level] for level, p in enumerate(positions) if level):
            return
        key = self.levels[0][positions[0]] if column else self.text[-1]
        gram = (*[self.levels[level][p] for level, p in enumerate(positions) if level], self.following[column])
        mine = self.pool.setdefault(key, [])  # type: ignore[arg-type]
        if gram in mine:
            mine.remove(gram)  # type: ignore[arg-type]
        self.pool[key] = [*mine, gram][-self.guesses :]  # type: ignore[index, list-item]

    def candidates(self, max_depth: int) -> set[tuple[int, ...]]:
        """All prefixes of the n-grams behind the last token."""
        grams = self.pool.get(self.text[-1], [])
        return {gram[:length] for gram in grams for length in range(1, min(len(gram), max_depth) + 1)}


def path(tree: DraftTree, node: int) -> list[int]:
    """Tokens from the first level down to this node."""
    found = []
    while node >= 0:
        found.append(tree.token_ids[node])
        node = tree.parents[node]
    return found[::-1]


def verify(tree: DraftTree, text: list[int], model: NextToken) -> list[int]:
    """The tokens that one step emits, by the engine's own walk."""

    def target(row: int, depth: int) -> int:
        return model(text + (path(tree, row - 1) if row else []))

    parents = [-1, *(parent + 1 for parent in tree.parents)]
    return walk_tree([text[-1], *tree.token_ids], parents, 0, target, tree.is_verified).token_ids


def argmax_behind_rows(tree: DraftTree, text: list[int], model: NextToken) -> list[int]:
    return [model(text + path(tree, node)) for node in range(len(tree)) if not tree.is_verified[node]]


class Session:
    """One request, decoded with drafts and simulated beside it."""

    def __init__(self, drafter: JacobiDrafter, paper: Paper, request_id: str = "a") -> None:
        self.drafter, self.paper, self.request_id = drafter, paper, request_id
        self.emitted: list[int] = []  # tokens of each step
        drafter.start(DraftRequest(request_id, list(paper.text)))

    def propose(self, **bounds: int) -> DraftTree:
        query = DraftQuery(self.request_id, **{"max_tokens": WIDE, "max_depth": WIDE, **bounds})
        (tree,) = self.drafter.propose([query])
        tree.check(query)
        return tree

    def step(self, *, is_dropped: bool = False, **bounds: int) -> None:
        """One step; a dropped tree is not verified, and nobody hears of it again."""
        paper = self.paper
        tree = self.propose(**bounds)
        query = DraftQuery(self.request_id, **{"max_tokens": WIDE, "max_depth": WIDE, **bounds})
        columns = paper.check_rows(tree, query)
        proposed = {tuple(path(tree, node)) for node in range(len(tree)) if tree.is_verified[node]}
        wanted = paper.candidates(query.max_depth)
        assert proposed <= wanted
        assert len(proposed) == min(len(wanted), query.max_tokens)
        if is_dropped:
            tree, columns = DraftTree(), 0
        given = verify(tree, paper.text, paper.model)
        paper.observe(columns)
        if columns:
            self.drafter.observe(self.request_id, argmax_behind_rows(tree, paper.text, paper.model))
        self.drafter.accept(self.request_id, given)
        paper.accept(given)
        self.emitted.append(len(given))


def session(
    model: NextToken, prompt: list[int], window: int = 5, ngram: int = 4, guesses: int | None = None
) -> Session:
    drafter = JacobiDrafter(window, ngram, guesses, prompt_ngrams=False)
    return Session(drafter, Paper(model, list(prompt), window, ngram, guesses or window))


@pytest.mark.parametrize("ngram", [2, 3, 5])
@pytest.mark.parametrize("window", [1, 4])
def test_the_window_is_a_jacobi_iteration(window: int, ngram: int) -> None:
    """Nothing is ever accepted: the paper's plain case, one token a step."""
    run = session(high_entropy, [5, 6, 7, 8], window, ngram)
    for _ in range(15):
        run.step()
    assert set(run.emitted) == {1}
    levels = run.paper.levels
    assert run.paper.height == ngram - 1
    # In the steady state every token but the first ones of the text came from the model.
    filled = [p for level, true in zip(levels, run.paper.true, strict=True) for p in level if p not in true]
    assert len(filled) <= 1, "only the place of the last token itself"
    # With W = 1 and N = 2 the window is the last token alone.
    assert (sum(len(grams) for grams in run.paper.pool.values()) >= 10) == (window * (ngram - 1) > 1)


def test_the_shape_of_a_full_tree_is_the_papers_figure() -> None:
    """W = 5, N = 4: positions 1 to 4, 1 to 5 and 2 to 6; a row's ancestors are what figure 2b lets it see."""
    run = session(high_entropy, [3, 1, 2])
    for _ in range(8):
        run.step()
    tree = run.propose()
    depths = tree.depths()
    assert depths == [1, 2, 3, 4, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    assert tree.is_verified == [False] * 14
    deepest = tree.parents.index(tree.parents[-1])
    green = tree.parents[deepest]
    assert depths[green] == 5
    assert [depths[node] for node in ancestors(tree, deepest)] == [5, 4, 3, 2, 1]
    assert ancestors(tree, deepest)[1:] == [3, 2, 1, 0], "the red token at 6 sees one green token and all of level 0"


def ancestors(tree: DraftTree, node: int) -> list[int]:
    found = []
    while tree.parents[node] >= 0:
        node = tree.parents[node]
        found.append(node)
    return found


@pytest.mark.parametrize("ngram", [3, 5])
@pytest.mark.parametrize(("model", "window"), [(low_entropy, 3), (low_entropy, 10), (moody, 10)])
def test_with_several_tokens_accepted_a_step_every_token_keeps_its_position(
    model: NextToken, ngram: int, window: int
) -> None:
    run = session(model, [1, 9, 2, 2, 7], window, ngram)
    for _ in range(60):
        run.step()
    assert max(run.emitted) == ngram, "a whole n-gram: its N - 1 tokens and the bonus token"
    assert sum(run.emitted) / 60 > 1.5, "the window alone makes a predictable model faster"


@given(
    seed=st.integers(0, 10**6),
    model=st.sampled_from([high_entropy, low_entropy, moody]),
    window=st.integers(1, 7),
    ngram=st.integers(2, 6),
    guesses=st.integers(1, 7),
)
@examples(150)
def test_under_any_budget_and_with_dropped_trees(
    seed: int, model: NextToken, window: int, ngram: int, guesses: int
) -> None:
    rng = random.Random(seed)
    run = session(model, [rng.randrange(24) for _ in range(rng.randint(1, 12))], window, ngram, guesses)
    num_prompt = len(run.paper.text)
    for _ in range(25):
        depth = rng.choice([1, 2, ngram, WIDE])
        bounds = {
            "max_tokens": rng.choice([0, 1, 3, rng.randint(0, 40), WIDE]),
            "max_depth": depth,
            "max_row_depth": depth + rng.choice([0, 3, WIDE]),
        }
        run.step(is_dropped=rng.random() < 0.2, **bounds)
        if rng.random() < 0.1:  # a step without a question: drafts are off, or the budget is spent
            given = [model(run.paper.text)]
            run.drafter.accept("a", given)
            run.paper.accept(given)
    plain = run.paper.text[:num_prompt]
    while len(plain) < len(run.paper.text):
        plain.append(model(plain))
    assert run.paper.text == plain, "the answer is what step-by-step decoding gives"


def test_requests_know_nothing_of_each_other() -> None:
    """Two requests in every call, one of them new in the middle: each one as if it were alone."""
    drafter = JacobiDrafter(4, 4, prompt_ngrams=False)
    runs = [Session(drafter, Paper(moody, [1, 2, 3], 4, 4, 4), "a")]
    for i in range(30):
        if i == 10:
            runs.append(Session(drafter, Paper(low_entropy, [6, 7], 4, 4, 4), "b"))
        for run in runs:
            run.step()
    drafter.end("a")
    reused = Session(drafter, Paper(moody, [8, 8, 8], 4, 4, 4), "a")
    assert reused.propose().num_verified == 0
    for _ in range(10):
        reused.step()
        runs[1].step()


def start(drafter: JacobiDrafter, prompt: list[int], **more: object) -> None:
    drafter.start(DraftRequest("a", prompt, **more))  # type: ignore[arg-type]


def candidates(drafter: JacobiDrafter, max_tokens: int = WIDE, max_depth: int = WIDE) -> DraftTree:
    """The verified part of a proposal, checked for what all candidates owe."""
    (tree,) = drafter.propose([DraftQuery("a", max_tokens, max_depth)])
    tree.check(DraftQuery("a", max_tokens, max_depth))
    count = tree.num_verified
    assert tree.is_verified == [True] * count + [False] * (len(tree) - count)
    assert not any(tree.probs[count:])
    last_sibling: dict[int, float] = {}
    sums: dict[int, float] = {}
    for parent, prob in zip(tree.parents[:count], tree.probs, strict=False):
        sums[parent] = sums.get(parent, 0.0) + prob
        assert 0 < prob <= last_sibling.get(parent, 1.0) + 1e-12
        assert prob < (tree.probs[parent] if parent >= 0 else 1.0)
        last_sibling[parent] = prob
    for parent, total in sums.items():
        assert total <= (tree.probs[parent] if parent >= 0 else 1.0) + 1e-12
    return DraftTree(tree.token_ids[:count], tree.parents[:count], tree.probs[:count])


def test_a_whole_candidate_is_accepted_with_the_bonus_token() -> None:
    drafter = JacobiDrafter(2, 5)
    start(drafter, [1, 2, 3, 4, 5, 9, 1])
    assert candidates(drafter).token_ids == [2, 3, 4, 5]
    (tree,) = drafter.propose([DraftQuery("a", WIDE, WIDE)])
    assert verify(tree, [1, 2, 3, 4, 5, 9, 1], lambda tokens: tokens[-1] + 1) == [2, 3, 4, 5, 6]


def test_candidates_are_merged_by_prefix_and_the_newest_counts_most() -> None:
    drafter = JacobiDrafter(2, 4, 5)
    start(drafter, [1, 7, 7, 7, 1, 2, 3, 4, 1, 2, 3, 5, 1])
    tree = candidates(drafter)
    assert {tuple(path(tree, node)) for node in range(len(tree))} == {
        (2,), (2, 3), (2, 3, 5), (2, 3, 4), (7,), (7, 7), (7, 7, 7),
    }  # fmt: skip
    assert path(tree, 2) == [2, 3, 5]
    assert tree.probs[0] > tree.probs[4], "two n-grams speak for 2, and one old one for 7"


def test_of_more_candidates_than_rows_the_likeliest_are_taken_and_depth_is_cut() -> None:
    drafter = JacobiDrafter(2, 4, 5)
    start(drafter, [1, 7, 8, 9, 1, 2, 3, 4, 1])
    full = candidates(drafter)
    by_prob = sorted(full.probs, reverse=True)
    for most in range(len(full) + 1):
        assert sorted(candidates(drafter, most).probs, reverse=True) == by_prob[:most]
    assert sorted(candidates(drafter, max_depth=1).token_ids) == [2, 7]
    assert candidates(drafter, max_depth=2).depths() == [1, 2, 1, 2]


def test_candidates_come_first_and_the_window_takes_whole_columns_of_the_rest() -> None:
    drafter = JacobiDrafter(6, 4, 3, prompt_ngrams=True)
    prompt = [1, 2, 3, 4, 5, 6, 1]
    paper = Paper(lambda tokens: tokens[-1] % 6 + 1, prompt, 6, 4, 3)
    start(drafter, prompt)
    text = list(prompt)
    for _ in range(6):
        (tree,) = drafter.propose([DraftQuery("a", WIDE, WIDE)])
        given = verify(tree, text, paper.model)
        drafter.observe("a", argmax_behind_rows(tree, text, paper.model))
        drafter.accept("a", given)
        text += given
    (full,) = drafter.propose([DraftQuery("a", WIDE, WIDE)])
    verified = full.num_verified
    assert (verified, len(full)) == (3, 3 + 6 * 3 - 1)
    for most in range(len(full) + 1):
        (tree,) = drafter.propose([DraftQuery("a", most, WIDE)])
        columns = max(0, (most - verified + 1) // 3)
        assert (tree.num_verified, len(tree) - tree.num_verified) == (min(verified, most), max(0, columns * 3 - 1))
    for depth in range(1, 9):
        (tree,) = drafter.propose([DraftQuery("a", WIDE, 1, depth)])
        assert max(tree.depths()) <= depth
        assert len(tree) - tree.num_verified == max(0, 3 * min(6, depth - 1) - 1)


def test_prompt_and_references_can_be_left_out_of_the_pool() -> None:
    prompt, reference = [4, 5, 6, 1, 2, 4], [4, 8, 9, 9]
    drafter = JacobiDrafter(2, 3, prompt_ngrams=True)
    start(drafter, prompt, references=[reference])
    assert candidates(drafter).token_ids == [5, 6, 8, 9], "the prompt is more recent than a reference"
    drafter = JacobiDrafter(2, 3, prompt_ngrams=False)
    start(drafter, prompt, references=[reference])
    assert candidates(drafter).token_ids == []


def test_the_answer_itself_is_in_the_pool_across_steps() -> None:
    drafter = JacobiDrafter(2, 4)
    start(drafter, [1, 2])
    for piece in ([3], [4, 5], [6], [7, 1]):
        drafter.accept("a", piece)
    assert candidates(drafter).token_ids == [2, 3, 4]
    drafter.accept("a", [2])
    assert candidates(drafter).token_ids == [3, 4, 5]


@given(
    grams=st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=60),
    guesses=st.integers(1, 4),
    max_ngrams=st.integers(1, 20),
    max_depth=st.integers(1, 3),
)
@examples(300)
def test_the_pool_keeps_the_latest_of_each_token_within_its_bound(
    grams: list[tuple[int, int, int]], guesses: int, max_ngrams: int, max_depth: int
) -> None:
    drafter = JacobiDrafter(1, 3, guesses, prompt_ngrams=False, max_ngrams=max_ngrams)
    start(drafter, [0])
    latest: list[tuple[int, ...]] = []  # with the places of those that were seen again, which stay empty
    for gram in grams:
        insert_gram(drafter._requests["a"].pool, guesses, np.array(gram, np.int32), True)
        again = [i for i, kept in enumerate(latest) if kept == gram]
        same = [i for i, kept in enumerate(latest) if kept and kept[0] == gram[0]]
        # The row that is overwritten is gone before the count of those that begin alike is looked at.
        same = [i for i in same if i > len(latest) - max_ngrams]
        again = [i for i in again if i > len(latest) - max_ngrams]
        for i in again or (same[:1] if len(same) == guesses else []):
            latest[i] = ()
        latest.append(gram)
    wanted = [gram for gram in latest[-max_ngrams:] if gram and gram[0] == 0]
    tree = candidates(drafter, max_depth=max_depth)
    assert {tuple(path(tree, node)) for node in range(len(tree))} == {
        gram[1 : 1 + length] for gram in wanted for length in range(1, min(2, max_depth) + 1)
    }
    if wanted:
        assert tree.token_ids[0] in {gram[1] for gram in wanted}


def test_memory_is_bounded_and_freed() -> None:
    drafter = JacobiDrafter(4, 4, max_ngrams=1000)
    start(drafter, list(range(50)))
    before = drafter.memory_bytes()
    assert 1000 * 4 * 4 < before < 1000 * 4 * 10
    for i in range(300):
        drafter.accept("a", list(range(i, i + 20)))
    assert drafter.memory_bytes() <= before + 4 * 64
    drafter.end("a")
    drafter.end("a")  # harmless
    assert drafter.memory_bytes() == 0


def test_a_request_is_started_once_and_options_have_bounds() -> None:
    drafter = JacobiDrafter(2, 3)
    start(drafter, [1])
    with pytest.raises(ValueError, match="'a'"):
        start(drafter, [2])
    drafter.accept("a", [])
    for options, message in (
        ({"window": 0}, "window = 0: must be at least 1"),
        ({"ngram": 1}, "ngram = 1: must be at least 2"),
        ({"guesses": 0}, "guesses = 0: must be at least 1"),
        ({"max_ngrams": 0}, "max_ngrams = 0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            JacobiDrafter(**options)


@pytest.mark.parametrize(
    ("grams", "given", "earned"),
    [
        ([((0, 1, 2), True)], [1, 2, 0], 2),
        ([((0, 1, 2), True)], [1, 0], 1),  # what comes behind the last draft was no draft
        ([((0, 1, 2), True)], [1], 0),
        ([((0, 1, 2), True)], [2, 1, 0], 0),
        ([((0, 1, 2), False)], [1, 2, 0], 0),
        ([((0, 1, 2), True), ((0, 1, 2), False)], [1, 2, 0], 0),
        ([((0, 1, 2), False), ((0, 1, 2), True)], [1, 2, 0], 0),  # the text had it before
        ([((0, 1, 3), False), ((0, 1, 2), True)], [1, 2, 0], 1),  # the first token stands in the text, too
        ([((0, 4, 5), False), ((0, 1, 2), True)], [1, 2, 0], 2),
        ([((0, 4, 5), False), ((0, 1, 2), True)], [4, 5, 0], 0),
    ],
)
def test_a_window_earns_what_only_it_has_found(
    grams: list[tuple[tuple[int, int, int], bool]], given: list[int], earned: int
) -> None:
    drafter = JacobiDrafter(1, 3, 4, prompt_ngrams=False)
    start(drafter, [0])
    for gram, is_found in grams:
        insert_gram(drafter._requests["a"].pool, 4, np.array(gram, np.int32), is_found)
    drafter.propose([DraftQuery("a", WIDE, 8)])
    drafter.accept("a", given)
    assert drafter.window_tokens("a") == earned


def test_the_texts_n_grams_are_not_the_windows() -> None:
    drafter = JacobiDrafter(1, 3, 4)
    start(drafter, [0, 1, 2, 3, 0])
    (tree,) = drafter.propose([DraftQuery("a", WIDE, 8)])
    assert tree.token_ids[: tree.num_verified] == [1, 2]
    drafter.accept("a", [1, 2, 3])
    assert drafter.window_tokens("a") == 0


def test_kernels_are_compiled_once_for_all_calls() -> None:
    """What compile_kernels prepares is all that requests need: nothing is compiled while one waits."""
    from batchserve.draft import jacobi_kernels

    compile_kernels()
    kernels = [jacobi_kernels.draft, jacobi_kernels.roll_window, jacobi_kernels.insert_text, jacobi_kernels.open_window]
    before = [len(kernel.signatures) for kernel in kernels]
    run = session(moody, [1, 2, 3])
    for _ in range(10):
        run.step()
    drafter = JacobiDrafter()
    drafter.start(DraftRequest("a", (1, 2, 3), references=(np.arange(9),)))  # type: ignore[arg-type]
    drafter.accept("a", [4, 5])
    drafter.propose([DraftQuery("a", 30, 4)])
    assert [len(kernel.signatures) for kernel in kernels] == before
