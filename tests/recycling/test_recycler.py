"""What the adapters of engines share, without an engine: options, texts, chains and trees, files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from token_recycling.engines.vllm_cpu import expand_batch_to_tokens, expands
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.recycling.occurrences import BREAK, masked
from token_recycling.recycling.recycler import Options, Recycler

VOCABULARY = 16


def counting(tokens: list[int]) -> torch.Tensor:
    """Logits (n, 16) of a model that counts: after token t come t + 1, t + 2, ..."""
    following = (torch.tensor(tokens)[:, None] + 1 + torch.arange(VOCABULARY)) % VOCABULARY
    return torch.empty(len(tokens), VOCABULARY).scatter_(
        1, following, torch.linspace(6, -6, VOCABULARY).repeat(len(tokens), 1)
    )


def taught(**options: object) -> Recycler:
    """A recycler that has seen the counting model after every token."""
    recycler = Recycler(VOCABULARY, 6, Options.parse({"k": 4, **options}))
    ngrams = np.full((VOCABULARY, recycler.options.orders), -1)
    ngrams[:, 0] = np.arange(VOCABULARY)
    recycler.learn(ngrams, counting(list(range(VOCABULARY))))
    return recycler


def test_a_chain_follows_the_likeliest_candidates_as_far_as_there_is_room() -> None:
    recycler = taught()
    state, tokens = recycler.new_state(), np.array([9, 3, 4], np.int32)
    assert recycler.chain(state, tokens, 6) == 6
    assert state.growing.tokens[1:7].tolist() == [5, 6, 7, 8, 9, 10]
    assert recycler.chain(state, tokens, 2) == 2
    assert recycler.chain(state, tokens, 99) == 6, "no more than the engine verifies"


def test_nothing_is_drafted_where_nothing_is_known() -> None:
    recycler = Recycler(VOCABULARY, 6, Options(k=4))
    assert recycler.chain(recycler.new_state(), np.array([1, 2, 3]), 6) == 0


def test_the_suffix_drafts_what_followed_in_the_same_text_alone() -> None:
    loop = np.array([1, 9, 5, 2, 1, 9, 5, 2, 1])
    with_suffix, without = Recycler(VOCABULARY, 3, Options(k=4)), Recycler(VOCABULARY, 3, Options(k=4, suffix=False))
    state = with_suffix.new_state()
    assert with_suffix.chain(state, loop, 3) == 3
    assert state.growing.tokens[1:4].tolist() == [9, 5, 2]
    assert with_suffix.chain(with_suffix.new_state(), loop[-1:], 3) == 0, "another request knows nothing of it"
    assert without.chain(without.new_state(), loop, 3) == 0


def test_a_text_that_is_not_a_continuation_is_read_anew() -> None:
    recycler = Recycler(VOCABULARY, 2, Options(k=4))
    state = recycler.new_state()
    recycler.chain(state, np.array([1, 9, 5, 2, 1, 9]), 2)
    for other in ([1, 9, 5], [7, 3, 7, 3, 7, 3, 7, 3]):
        recycler.chain(state, np.array(other), 2)
        assert state.text.tokens.tolist() == other
    assert state.growing.tokens[1:3].tolist() == [7, 3]


def test_a_tree_has_the_nodes_of_most_probability() -> None:
    recycler = taught(suffix=False)
    state = recycler.new_state()
    assert recycler.tree(state, np.array([3]), 16) == 7
    growing = state.growing
    assert growing.tokens[0] == 3
    assert growing.parents[:7].tolist()[0] == -1
    assert {4, 5} <= set(growing.tokens[1:7].tolist())
    assert all(growing.values[1:7] <= growing.values[:6]), "the likeliest first"


def test_what_followed_is_counted_along_the_nodes_that_came_true() -> None:
    """After each token four candidates are counted, the next four numbers; after 9, which came instead of 7, two of
    those beside it too, 7 and 8.
    """
    recycler = taught(suffix=False)
    state, tokens, seen = recycler.new_state(), [3, 4], []
    for emitted in ([5, 6, 9], [10], [2, 3], [4]):
        recycler.chain(state, np.array(tokens), 6)
        before = recycler.matrix.calibration.sum(axis=0)
        tokens += emitted
        recycler.chain(state, np.array(tokens), 6)
        seen.append((recycler.matrix.calibration.sum(axis=0) - before).tolist())
    assert seen == [[3, 12], [1, 6], [0, 4], [1, 4]]


def test_what_requests_wrote_is_drafted_in_later_ones() -> None:
    """Their prompts are not, by which it is found; nor does anything stay where a matrix does not learn."""
    said = list(np.random.default_rng(0).permutation(VOCABULARY)) * 3
    for learns, past, wanted in ((True, 64, said[8:11]), (False, 64, []), (True, 0, [])):
        recycler = Recycler(VOCABULARY, 3, Options(k=4, learns=learns, past=past, suffix=False))
        state = recycler.new_state()
        for length in range(2, 42, 5):
            recycler.chain(state, np.array(said[:length]), 3)
        later = recycler.new_state()
        assert recycler.chain(later, np.array(said[3:8]), 3) == len(wanted)
        assert later.growing.tokens[1 : len(wanted) + 1].tolist() == wanted
        if wanted:
            assert recycler.matrix.past.tokens.tolist() == [BREAK, *masked(np.array(said[:2])), *said[2:37]]


def test_requests_that_are_written_at_once_do_not_mix() -> None:
    recycler = Recycler(100, 3, Options(k=4))
    states, texts = [recycler.new_state() for _ in range(2)], [list(range(50)), list(range(50, 100))]
    for length in range(1, 51):
        for state, text in zip(states, texts, strict=True):
            recycler.chain(state, np.array(text[:length]), 3)
    prompts = [masked(np.array([token]))[0] for token in (0, 50)]
    assert recycler.matrix.past.tokens.tolist() == [
        *(BREAK, prompts[0], *range(1, 33)),
        *(BREAK, prompts[1], *range(51, 83)),
    ]


def test_nothing_is_counted_for_a_text_that_is_not_a_continuation() -> None:
    recycler = taught()
    state = recycler.new_state()
    recycler.chain(state, np.array([3, 4]), 6)
    recycler.chain(state, np.array([3, 7, 8]), 6)
    assert not recycler.matrix.calibration.any()


def test_a_matrix_that_does_not_learn_stays_as_it_is() -> None:
    frozen = Recycler(VOCABULARY, 6, Options(k=4, learns=False))
    frozen.learn(np.array([[1, -1, -1]]), counting([1]))
    state = frozen.new_state()
    frozen.chain(state, np.array([1, 2, 1]), 6)
    frozen.chain(state, np.array([1, 2, 1, 2]), 6)
    assert not frozen.matrix.filled.any()
    assert not frozen.matrix.calibration.any()
    assert not len(frozen.matrix.past)


def test_the_matrix_is_kept_in_a_file_that_the_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "engine.matrix"
    first = taught(matrix=str(path))
    first.save()
    read = NgramMatrix(VOCABULARY, k=4)
    read.load(path)
    assert np.array_equal(read.candidates, first.matrix.candidates)
    again = Recycler(VOCABULARY, 6, Options(k=4, matrix=str(path)))
    assert again.matrix.look_up(3) == first.matrix.look_up(3)


def test_a_file_that_is_not_there_is_refused_where_none_will_be_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a matrix file at .*, since learns is false, got none"):
        Recycler(VOCABULARY, 6, Options(k=4, learns=False, matrix=str(tmp_path / "missing")))


def test_only_one_process_writes_and_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "engine.matrix"
    options = Options(k=4, matrix=str(path))
    ngrams = np.array([[1, -1, -1]])
    for recycler in (Recycler(VOCABULARY, 6, options, saves=False), Recycler(VOCABULARY, 6, options)):
        recycler.save()
        assert not path.exists()
        recycler.learn(ngrams, counting([1]))
        recycler.save()
    assert path.exists()
    path.unlink()
    recycler.save()
    assert not path.exists(), "nothing was learned since"


def test_it_is_saved_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("token_recycling.recycling.recycler.time.monotonic", lambda: now[0])
    path = tmp_path / "engine.matrix"
    recycler = taught(matrix=str(path), save_seconds=10.0)
    now[0] = 109.0
    recycler.save_if_due()
    assert not path.exists()
    now[0] = 110.0
    recycler.save_if_due()
    assert path.exists()


def test_a_disk_that_refuses_is_logged_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file" / "engine.matrix"
    recycler = taught(matrix=str(path))
    (tmp_path / "file").write_text("no folder")
    recycler.save()
    assert "could not be saved" in caplog.text
    (tmp_path / "file").unlink()
    recycler.save()
    assert path.exists()


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"order": 2}, "expected options of k, orders.*got order"),
        ({"k": "8"}, "expected k of type int, got '8'"),
        ({"k": True}, "expected k of type int, got True"),
        ({"suffix": 1}, "expected suffix of type bool, got 1"),
        ({"token_cost": 1}, "expected token_cost from 0"),
        ({"save_seconds": 0}, "expected save_seconds above 0"),
        ("k=8", "as an object of names and values"),
    ],
)
def test_wrong_options_are_refused(given_options: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse(given_options)


def test_numbers_without_a_point_are_numbers() -> None:
    assert Options.parse({"memory": 1, "token_cost": 0}) == Options(memory=1, token_cost=0)


@pytest.mark.parametrize("options", [{}, {"suffix": False, "orders": 1}, {"memory": 0.0, "past": 0}])
def test_warming_up_compiles_and_leaves_no_trace(options: dict[str, object], tmp_path: Path) -> None:
    recycler = Recycler(VOCABULARY, 6, Options.parse({**options, "matrix": str(tmp_path / "m")}))
    recycler.warm_up()
    assert not recycler.matrix.filled.any()
    assert not len(recycler.matrix.past)
    assert not list(tmp_path.iterdir())


def test_values_are_repeated_for_the_tokens_of_their_request() -> None:
    assert expands(expand_batch_to_tokens)
    assert not expands(lambda x, cu_num_tokens, num_tokens, **_: torch.full((num_tokens,), 0.25))
    top_k = expand_batch_to_tokens(torch.tensor([3, 5], dtype=torch.int32), torch.tensor([0, 2]), 2)
    assert top_k.tolist() == [5, 5]
    assert top_k.dtype == torch.int32


def test_the_documentation_lists_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    for option in dataclasses.fields(Options):
        default = {"": "none", "True": "`true`"}.get(str(option.default)) or f"{option.default:.7g}"
        assert f"\n| `{option.name}` | {default} |" in page
