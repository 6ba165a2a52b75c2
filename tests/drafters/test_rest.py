"""REST: the most frequent prefixes compared with a full count, a tree computed by hand, and the build command."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import runs, tiny
from support.commandline import PROMPT, assert_refused, run, run_json

import token_recycling as tr
from token_recycling import Context, fingerprint
from token_recycling.drafters.rest import Datastore, DatastoreError, Rest, build, frequent_prefixes
from token_recycling.model.target import Target


def draft_after(drafter, text, room=99):
    return runs.begun(drafter, text, Target(tiny.counting_llama())).draft(Context(torch.tensor(text), room))


@pytest.fixture
def store(tmp_path):
    """After 1 2 stands 3 4 twice, 3 5 once and 6 7 three times; after 0 1 2 stands 8 9."""
    followed = [[3, 4], [3, 4], [3, 5], [6, 7], [6, 7], [6, 7]]
    build([*([1, 2, *after] for after in followed), [0, 1, 2, 8, 9]], tmp_path / "store")
    return tmp_path / "store"


@given(st.lists(st.lists(st.integers(-1, 2), min_size=4, max_size=4), min_size=1, max_size=30), st.integers(1, 12))
def test_most_frequent_prefixes_are_found(rows, most):
    counts = Counter()
    for row in rows:
        for end in range(1, 5):
            if -1 in row[:end]:
                break
            counts[tuple(row[:end])] += 1
    found = frequent_prefixes(np.array(sorted(rows)), most)
    assert found == {prefix: counts[prefix] for prefix in found}
    assert len(found) == min(most, len(counts))
    assert sorted(counts[prefix] for prefix in found) == sorted(count for _, count in counts.most_common(most))
    assert [len(prefix) for prefix in found] == sorted(len(prefix) for prefix in found)
    assert all(prefix[:-1] in found for prefix in found if len(prefix) > 1)


def test_tree_has_the_most_frequent_prefixes(store):
    """Counts: 3, 6 and 6 7 three times, 3 4 twice, 3 5, 8 and 8 9 once."""
    draft = draft_after(Rest(store, nodes=4), [9, 1, 2])
    assert draft.tokens.tolist() == [2, 3, 6, 7, 4]
    assert draft.parents.tolist() == [-1, 0, 0, 2, 1]
    assert draft.probabilities.tolist() == pytest.approx([1, 3 / 7, 3 / 7, 1, 2 / 3])
    assert len(draft_after(Rest(store), [9, 1, 2])) == 8
    # 0 1 2 occurs once: only continuations of the longest suffix are drafted; with one match, only of the newest.
    assert draft_after(Rest(store), [5, 0, 1, 2]).tokens.tolist() == [2, 8, 9]
    assert len(draft_after(Rest(store, max_matching_ngram_size=2), [5, 0, 1, 2])) == 8
    assert draft_after(Rest(store, max_matches=1), [1, 2]).tokens.tolist() == [2, 8, 9]
    assert len(draft_after(Rest(store), [5, 5, 2])) == 1
    assert draft_after(Rest(store, num_tokens=1), [1, 2]).depth == 1
    assert draft_after(Rest(store), [1, 2], room=1).depth == 1


# tokenizers


def test_each_target_is_checked_against_its_own_tokenizer(counting, loaded, tmp_path):
    """In any order: an unknown tokenizer, one that fits and one that does not."""
    for name, tokenizer in (("other", "0123456789abcdef"), ("own", fingerprint(loaded.tokenizer))):
        build([[1, 2]], tmp_path / name, tokenizer)
    other, own = Rest(tmp_path / "other"), Rest(tmp_path / "own")
    assert "not checked" in runs.begun(other, [1], Target(counting)).describe()
    with pytest.raises(DatastoreError, match="got 0123456789abcdef"):
        runs.begun(other, [1], Target(loaded.model))
    assert "not checked" not in runs.begun(own, [1], Target(loaded.model)).describe()
    build([[1, 15]], tmp_path / "as_large")
    assert runs.begun(Rest(tmp_path / "as_large"), [1], Target(counting))
    build([[1, 16]], tmp_path / "larger")
    with pytest.raises(DatastoreError, match="got 16"):
        next(tr.stream(counting, torch.tensor([1]), Rest(tmp_path / "larger")))


# the command


def test_build_reads_files_and_folders_and_its_datastore_drafts(loaded, tiny_model_dir, tmp_path):
    for name in ("deep", ".git"):
        (tmp_path / "texts" / name).mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "b.txt").write_text("line one\nline two\n" * 9000)
    for name in (".hidden", ".git/index"):
        (tmp_path / "texts" / name).write_bytes(b"\xff")
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    said = loaded.model.generate(ids, max_new_tokens=24, do_sample=False)
    (tmp_path / "a.txt").write_text(loaded.tokenizer.decode(said[0]))
    output = tmp_path / "out" / "texts.datastore"
    found = run_json(
        "datastore", "build", tmp_path / "texts", tmp_path / "a.txt", "--model", tiny_model_dir, "--output", output
    )
    whole = loaded.tokenizer("line one\nline two\n" * 9000)["input_ids"]
    other = loaded.tokenizer((tmp_path / "a.txt").read_text())["input_ids"]
    store = Datastore(output)
    assert store.tokens.tolist() == [*whole, -1, *other, -1]
    assert (found["documents"], found["tokens"], found["bytes"]) == (2, len(store), output.stat().st_size)
    assert found["tokenizer"] == store.tokenizer == fingerprint(loaded.tokenizer)
    spec = f"rest:datastore={output}"
    drafted = run_json("generate", tiny_model_dir, PROMPT, "--drafter", spec, "--max-new-tokens", 24)
    assert drafted["tokens"] == said[0, ids.shape[1] :].tolist()
    assert drafted["stats"]["drafted_tokens"] > 0
    run("datastore", "build", tmp_path / "a.txt", "--model", tiny_model_dir, "--output", output)
    assert len(Datastore(output)) == len(other) + 1


def test_build_refuses_invalid_arguments(tiny_model_dir, tmp_path):
    def build_of(*files, output=tmp_path / "out"):
        return run("datastore", "build", *files, "--model", tiny_model_dir, "--output", output)

    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("")
    (tmp_path / "folder").mkdir()
    assert_refused(build_of(tmp_path / "none"), "none")
    assert_refused(build_of(tmp_path / "folder"), "folder")
    assert_refused(build_of(tmp_path / "binary"), "UTF-8", "binary")
    assert_refused(build_of(tmp_path / "empty"), "got 0")
    assert_refused(build_of(tmp_path / "empty", output=tmp_path / "folder"), "got the folder")
    assert_refused(run("datastore", "build", "x"), "--model")
    assert_refused(run("generate", tiny_model_dir, "hi", "--drafter", "rest"), "rest:datastore=VALUE")
    assert "build" in run("datastore").stdout
    assert not (tmp_path / "out").exists()
