"""Masks along draft trees are those of the same tokens without drafts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from batchserve.draft.base import DraftQuery, DraftTree
from batchserve.draft.forest import FORCED
from batchserve.errors import GrammarError
from batchserve.grammar import compiler as compiler_module
from batchserve.grammar.compiler import GrammarCompiler, Vocabulary
from batchserve.grammar.definition import Grammar
from batchserve.grammar.state import GrammarState
from batchserve.runner.model_folder import resolve_model

VOCAB, EOS = 4096, 0
OBJECT = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer",'
    '"minimum": 0, "maximum": 20}}, "required": ["name", "age"], "additionalProperties": false}'
)
GRAMMARS = [
    Grammar("json_schema", OBJECT),
    Grammar("json_schema", OBJECT, is_compact=False),
    Grammar("json_schema", '{"type": "array", "items": {"enum": ["foo", "foobar", "x", 12]}}'),
    Grammar("json_object", '{"type": "object"}'),
    Grammar("regex", "[a-z]{3,10}@(foo|foz)[.]com"),
    Grammar("ebnf", 'root ::= "yes" | "no " num\nnum ::= [0-9]+'),
    Grammar("ebnf", 'start: "hello" | "help me" | "hel" /[0-9]+/'),
]
TOKENIZER = Tokenizer.from_file(str(Path(resolve_model("bundled")) / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: Vocabulary(TOKENIZER.to_str(), VOCAB, (EOS,)))


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def mask_of(state: GrammarState) -> np.ndarray:
    masks = np.zeros((1, state.num_words), np.uint32)
    state.fill_masks(masks, [], [], [])
    return masks[0]


def random_answer(state: GrammarState, rng: random.Random, length: int) -> list[int]:
    """Tokens that follow the grammar, which the state has taken."""
    taken: list[int] = []
    while len(taken) < length and not state.is_complete:
        choices = [token for token in allowed(mask_of(state)) if token != EOS]
        if not choices:
            break
        taken.append(rng.choice(choices))
        state.accept(taken[-1:])
    return taken


def random_tree(compiler: GrammarCompiler, grammar: Grammar, answer: list[int], rng: random.Random) -> DraftTree:
    """Some branches that follow the grammar and some that do not, in no order but parents first."""
    tree = DraftTree()
    for _ in range(rng.randint(1, 4)):
        state, parent, prob = GrammarState(grammar, compiler, VOCAB), -1, 1.0
        state.accept(answer)
        for token in random_answer(state, rng, rng.randint(1, 6)):
            token_id = token if rng.random() < 0.85 else rng.randrange(VOCAB)
            places = zip(tree.token_ids, tree.parents, strict=True)
            same = [node for node, each in enumerate(places) if each == (token_id, parent)]
            prob *= rng.uniform(0.3, 1.0)
            parent = same[0] if same else tree.add(token_id, parent, prob)
            prob = tree.probs[parent]
    return tree


def path_to(tree: DraftTree, node: int) -> list[int]:
    tokens: list[int] = []
    while node >= 0:
        tokens.insert(0, tree.token_ids[node])
        node = tree.parents[node]
    return tokens


def follows(compiler: GrammarCompiler, grammar: Grammar, tokens: list[int]) -> np.ndarray | None:
    """The mask after these tokens, by a state of their own; None if they are not allowed."""
    state = GrammarState(grammar, compiler, VOCAB)
    for token in tokens:
        if token not in allowed(mask_of(state)) or token == EOS:
            return None
        state.accept([token])
    return mask_of(state)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=str)
def test_masks_along_trees_are_those_of_their_paths(grammar: Grammar, compiler: GrammarCompiler) -> None:
    rng, num_forbidden, num_nodes = random.Random(3), 0, 0
    for _ in range(25):
        state = GrammarState(grammar, compiler, VOCAB)
        answer = random_answer(state, rng, rng.randint(0, 12))
        for _ in range(2):  # looking at a tree leaves no trace
            tree = random_tree(compiler, grammar, answer, rng)
            masks = np.ones((len(tree) + 1, state.num_words), np.uint32)
            state.fill_masks(masks, tree.token_ids, tree.parents, tree.is_verified)
            for node in range(-1, len(tree)):
                path = path_to(tree, node)
                expected = follows(compiler, grammar, answer + path)
                num_nodes += 1
                if expected is None:
                    num_forbidden += 1
                    assert not masks[node + 1].any()
                else:
                    assert np.array_equal(masks[node + 1], expected)
                    assert np.array_equal(state.mask_after(path), expected)
    assert num_nodes > 2 * 25
    assert num_forbidden > 5


@pytest.mark.parametrize("grammar", GRAMMARS, ids=str)
def test_trees_lose_what_is_forbidden_and_gain_what_is_forced(grammar: Grammar, compiler: GrammarCompiler) -> None:
    rng, num_forced, num_dropped = random.Random(4), 0, 0
    for _ in range(40):
        state = GrammarState(grammar, compiler, VOCAB)
        answer = random_answer(state, rng, rng.randint(0, 12))
        tree = random_tree(compiler, grammar, answer, rng)
        most, deepest = rng.choice([(rng.randint(1, 12), rng.randint(1, 8)), (1000, 100)])
        found = state.constrain(tree, most, deepest)
        found.check(DraftQuery("a", most, deepest))
        paths = [path_to(tree, node) for node in range(len(tree))]
        for node in range(len(found)):
            path = path_to(found, node)
            above = follows(compiler, grammar, answer + path[:-1])
            assert above is not None
            assert path[-1] in allowed(above)
            if found.probs[node] == FORCED:
                num_forced += 1
                assert allowed(above) == [path[-1]]
            else:
                assert path in paths
        num_dropped += sum(follows(compiler, grammar, answer + path) is None for path in paths)
        again = state.constrain(tree, most, deepest)
        assert (again.token_ids, again.parents, again.probs) == (found.token_ids, found.parents, found.probs)
        if most == 1000:
            kept = [path for path in paths if follows(compiler, grammar, answer + path) is not None]
            assert all(path in [path_to(found, node) for node in range(len(found))] for path in kept)
    assert num_dropped > 0
    assert num_forced > 0 or grammar.field == "json_object" or not grammar.is_compact


def test_forced_tokens_come_first_of_too_many(compiler: GrammarCompiler) -> None:
    state = GrammarState(GRAMMARS[0], compiler, VOCAB)
    assert TOKENIZER.decode(state.forced) == '{"name":'
    found = state.constrain(DraftTree([5], [-1], [0.9]), 3, 8)
    assert found.token_ids == state.forced[:3]
    assert found.probs == [FORCED] * 3
    assert found.parents == [-1, 0, 1]
    assert len(state.constrain(DraftTree(), 8, 2)) == 2


def test_nodes_that_are_not_verified_stay(compiler: GrammarCompiler) -> None:
    state = GrammarState(GRAMMARS[0], compiler, VOCAB)
    tree = DraftTree()
    tree.add(state.forced[0], -1, 0.5)
    window = tree.add(7, -1, 0.5, is_verified=False)
    tree.add(8, window, 0.5, is_verified=False)
    found = state.constrain(tree, 4, 8)
    assert [token for token, known in zip(found.token_ids, found.is_verified, strict=True) if not known] == [7, 8]
    found.check(DraftQuery("a", 4, 8))
    assert found.num_verified == 2


def test_an_answer_that_nothing_may_follow_is_complete(compiler: GrammarCompiler) -> None:
    state = GrammarState(Grammar("choice", "ab|abc"), compiler, VOCAB)
    state.accept(TOKENIZER.encode("ab", add_special_tokens=False).ids)
    assert not state.is_complete
    assert EOS in allowed(mask_of(state))
    state.accept(TOKENIZER.encode("c", add_special_tokens=False).ids)
    assert state.is_complete
    assert allowed(mask_of(state)) == [EOS]


def test_end_tokens_that_do_not_end_the_answer_are_not_allowed(compiler: GrammarCompiler) -> None:
    state = GrammarState(Grammar("regex", "a*"), compiler, VOCAB, ignored_ends=[EOS])
    assert EOS not in allowed(mask_of(state))


def test_tokens_against_the_grammar_are_an_error(compiler: GrammarCompiler) -> None:
    state = GrammarState(GRAMMARS[0], compiler, VOCAB)
    with pytest.raises(GrammarError, match="the answer does not follow its grammar"):
        state.accept([5, 6])


def test_answers_go_on_when_what_they_share_has_reached_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a grammar share the states that the library makes as it goes, and it makes so many at most."""
    monkeypatch.setattr(compiler_module, "MAX_LEXER_STATES", 5_000)
    grammar = Grammar("json_schema", '{"type": "integer", "multipleOf": 9973}')
    few = GrammarCompiler(lambda: Vocabulary(TOKENIZER.to_str(), VOCAB, (EOS,)))
    rng, fresh = random.Random(0), few.fresh
    renewed: list[Grammar] = []
    monkeypatch.setattr(few, "fresh", lambda grammar: renewed.append(grammar) or fresh(grammar))
    lengths = [len(random_answer(GrammarState(grammar, few, VOCAB), rng, 40)) for _ in range(60)]
    assert min(lengths) > 0
    assert 0 < len(renewed) < 30


def test_a_grammar_that_takes_ever_longer_is_an_error(compiler: GrammarCompiler) -> None:
    """It is compiled at once, and can be read in ever more ways."""
    state = GrammarState(Grammar("ebnf", 'start: e\ne: e e e | e e | "a" | ""'), compiler, VOCAB, [EOS])

    def go_on() -> None:
        for _ in range(2000):
            state.constrain(DraftTree(), 10, 10)
            state.accept(TOKENIZER.encode("a", add_special_tokens=False).ids)
            mask_of(state)

    with pytest.raises(GrammarError, match="takes too long to find"):
        go_on()
    assert len(state.constrain(DraftTree([1], [-1], [0.5]), 10, 10)) == 0  # and is not looked at for drafts


def with_tokenizer(definition: str, ends: tuple[int, ...]) -> GrammarCompiler:
    size = Tokenizer.from_str(definition).get_vocab_size(with_added_tokens=True)
    return GrammarCompiler(lambda: Vocabulary(definition, size, ends))


def test_a_model_without_an_end_token(compiler: GrammarCompiler) -> None:
    endless = with_tokenizer(TOKENIZER.to_str(), ())
    state, rng = GrammarState(Grammar("regex", "(ab|cd){2,3}"), endless, VOCAB), random.Random(0)
    random_answer(state, rng, 60)
    assert state.is_complete
    assert endless.stand_in
    state = GrammarState(Grammar("regex", "[a-z]*"), endless, VOCAB)
    assert not set(allowed(mask_of(state))) & {*endless.stand_in}


def test_tokenizers_that_put_a_space_before_texts() -> None:
    definition = json.loads(TOKENIZER.to_str())
    assert definition["pre_tokenizer"]["pretokenizers"][-1]["type"] == "ByteLevel"
    definition["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    spaced = with_tokenizer(json.dumps(definition), (EOS,))
    for seed in range(8):
        state = GrammarState(GRAMMARS[0], spaced, VOCAB)
        tokens = random_answer(state, random.Random(seed), 80)
        assert json.loads(TOKENIZER.decode(tokens))["age"] in range(21)


def test_a_tokenizer_that_gives_other_texts_is_refused() -> None:
    definition = json.loads(TOKENIZER.to_str())
    definition["normalizer"] = {"type": "Lowercase"}
    definition["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": False}
    with pytest.raises(GrammarError, match="the model's tokenizer cannot be used with grammars"):
        with_tokenizer(json.dumps(definition), (EOS,)).matcher(GRAMMARS[0])


def test_a_grammar_that_fails_by_itself_is_an_error(compiler: GrammarCompiler) -> None:
    """Compiled in a moment, it becomes too complex after the first tokens."""
    state = GrammarState(Grammar("regex", r"(\p{L}{1,500}){1,500}"), compiler, VOCAB)
    with pytest.raises(GrammarError, match=r"cannot be found|does not follow"):
        random_answer(state, random.Random(0), 40)
