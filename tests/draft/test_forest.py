"""A step's trees in one piece: they stay the trees that they were, and a breach of any is found."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchserve.draft.base import DraftQuery, DraftRequest, DraftTree
from batchserve.draft.forest import DraftForest, DraftQueries
from batchserve.draft.mixture import MixtureDrafter
from batchserve.request import DraftScope
from tests.factories import examples, random_tree


def random_trees(rng: random.Random, count: int) -> list[DraftTree]:
    trees = [random_tree(rng, rng.randint(1, 20), 50) for _ in range(count)]
    return [DraftTree() if rng.random() < 0.2 else tree for tree in trees]


@examples(50)
@given(st.integers(0, 2**32), st.integers(0, 6))
def test_trees_come_back_as_they_were_whole_or_in_part(seed: int, count: int) -> None:
    rng = random.Random(seed)
    trees = random_trees(rng, count)
    forest = DraftForest.of(trees)
    assert forest.trees() == trees
    kept: list[list[int]] = []
    for tree in trees:
        nodes: list[int] = []
        for node, parent in enumerate(tree.parents):
            if rng.random() < 0.7 and (parent < 0 or parent in nodes):
                nodes.append(node)
        kept.append(nodes)
    keep = np.zeros(len(forest.token_ids), np.bool_)
    for start, nodes in zip(forest.starts.tolist(), kept, strict=False):
        keep[[start + node for node in nodes]] = True
    assert forest.take(keep).trees() == [tree.take(nodes) for tree, nodes in zip(trees, kept, strict=True)]


@pytest.mark.parametrize("places", [[], [0], [2], [0, 3], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_trees_among_others_that_are_empty(places: list[int]) -> None:
    trees = [random_tree(random.Random(place), place, 50) for place in places]  # the one at place 0 is empty, too
    spread = DraftForest.of(trees).spread(np.array(places, np.int64), 5)
    expected = dict(zip(places, trees, strict=True))
    assert spread.trees() == [expected.get(place, DraftTree()) for place in range(5)]
    assert spread.sizes.tolist() == [len(expected.get(place, DraftTree())) for place in range(5)]


def test_a_node_is_not_taken_without_its_parent() -> None:
    forest = DraftForest.of([DraftTree([1], [-1], [1.0]), DraftTree([1, 2], [-1, 0], [1.0, 1.0])])
    with pytest.raises(ValueError, match="left out"):
        forest.take(np.array([True, False, True]))


@pytest.mark.parametrize("parent", [-2, 1, 2, 5, 10**6, 2**45])
def test_no_parent_is_followed_that_does_not_come_before_its_node(parent: int) -> None:
    forest = DraftForest.of([DraftTree([1, 2, 3], [-1, parent, 0], [1.0] * 3, [True, True, False])])
    with pytest.raises(ValueError, match="does not come before it"):
        forest.take(forest.is_verified)


def test_there_is_a_tree_for_every_query_and_no_other() -> None:
    forest = DraftForest.of([DraftTree([1], [-1], [1.0])] * 3)
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"3 draft trees for {count} queries"):
            forest.check(DraftQueries.of([DraftQuery("a", 9, 9)] * count))
    with pytest.raises(ValueError, match="not as many"):
        DraftForest.of([DraftTree([1], [-1], [0.9, 0.8])])
    DraftForest.of([]).check(DraftQueries.of([]))


@pytest.mark.parametrize("starts", [[0, 1], [1, 2], [0, 3]])
def test_every_node_is_of_a_tree(starts: list[int]) -> None:
    forest = DraftForest.of([DraftTree([1, 2], [-1, 0], [0.9, 0.8])])._replace(starts=np.array(starts))
    with pytest.raises(ValueError, match="draft"):
        forest.check(DraftQueries.of([DraftQuery("a", 9, 9)]))


def test_of_nobody_nothing_is_drafted_and_who_is_refused_leaves_nothing_behind() -> None:
    drafter = MixtureDrafter()
    assert drafter.propose([]) == []
    drafter.accept_all({})
    with pytest.raises((ValueError, OverflowError)):
        drafter.start(DraftRequest("a", [1, 2, 3], scope=DraftScope("tenant", "a"), seed=-1))
    assert drafter.memory_bytes() == 0


def test_of_late_tokens_all_are_text_and_the_last_are_learned_from() -> None:
    late, always = MixtureDrafter(), MixtureDrafter()
    text = [*range(10, 60), 3, 4, 10, 11, 12]  # begins again at its end
    for drafter in (late, always):
        drafter.start(DraftRequest("a", [1, 2]))
    late.catch_up({"a": text})
    always.accept("a", text)
    for drafter in (late, always):
        assert drafter.propose([DraftQuery("a", 4, 4)])[0].token_ids == [13, 14, 15, 16]


def is_sound(tree: DraftTree, query: DraftQuery) -> bool:
    try:
        tree.check(query)
    except ValueError:
        return False
    return True


@examples(300)
@given(st.data())
def test_a_breach_is_found_where_a_tree_alone_would_have_it(data: st.DataObject) -> None:
    nodes = st.tuples(st.integers(0, 3), st.integers(-2, 3), st.booleans())
    trees = []
    for drawn in data.draw(st.lists(st.lists(nodes, max_size=5), min_size=1, max_size=3)):
        tokens, parents, is_verified = ([each[i] for each in drawn] for i in range(3))
        trees.append(DraftTree(tokens, parents, [1.0] * len(drawn), is_verified))  # type: ignore[arg-type]
    sizes = st.integers(0, 5)
    queries = [DraftQuery("a", data.draw(sizes), data.draw(sizes), data.draw(sizes)) for _ in trees]
    forest = DraftForest.of(trees)
    if all(is_sound(tree, query) for tree, query in zip(trees, queries, strict=True)):
        forest.check(DraftQueries.of(queries))
    else:
        with pytest.raises(ValueError, match="draft"):
            forest.check(DraftQueries.of(queries))


def test_requests_that_are_drafted_together_get_what_each_gets_alone() -> None:
    """And learn the same, whatever they share, and wherever their texts have to grow."""
    together, alone = MixtureDrafter(), MixtureDrafter()
    rng = random.Random(3)
    text = [rng.randrange(40) for _ in range(400)]
    names = [f"r{i}" for i in range(5)]
    for i, name in enumerate(names):
        scope = None if i == 0 else DraftScope("tenant", "ab"[i % 2])
        for drafter in (together, alone):
            drafter.start(DraftRequest(name, text[i * 7 : 200 + i], scope=scope, temperature=0.8 * (i == 4), seed=i))
    num_nodes = 0
    for _ in range(40):
        given = {name: [rng.choice(text) for _ in range(rng.randint(0, 90))] for name in rng.sample(names, 4)}
        together.accept_all(given)
        for name, tokens in given.items():
            alone.accept(name, tokens)
        for name, tokens in given.items():
            together.share(name, tokens)
            alone.share(name, tokens)
        queries = [DraftQuery(name, rng.randint(0, 20), rng.randint(0, 6)) for name in rng.sample(names, 3)]
        forest = together.propose_all(DraftQueries.of(queries))
        forest.check(DraftQueries.of(queries))
        assert forest.trees() == [alone.propose([query])[0] for query in queries]
        num_nodes += len(forest.token_ids)
    assert num_nodes > 500
    assert together.memory_bytes() == alone.memory_bytes()


def test_forests_become_one_in_any_order() -> None:
    trees = [DraftTree([n] * n, [-1] * n, [0.1 * n] * n, [n % 2 == 0] * n) for n in range(6)]
    for places in ([[0, 1], [2, 3, 4, 5]], [[1, 5], [3], [0, 2, 4]], [[5, 3, 1], [4, 2, 0]]):
        merged = DraftForest.merged([(mine, DraftForest.of([trees[i] for i in mine])) for mine in places])
        assert merged.trees() == trees
        assert [array.dtype for array in merged] == [array.dtype for array in DraftForest.of(trees)]
    with pytest.raises(ValueError, match="1 draft trees for 2 queries"):
        DraftForest.merged([([0, 1], DraftForest.of(trees[:1])), ([2], DraftForest.of(trees[:2]))])
