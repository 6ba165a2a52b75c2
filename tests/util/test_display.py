"""What notebooks show: every figure and text is there, escaped, and well-formed."""

import re
from html.parser import HTMLParser

import pytest
import torch
from support import tiny

from token_recycling import Stats, stream
from token_recycling._util.display import Html, mat_over_time, text_by_step, tree, visible


class Words(HTMLParser):
    """The texts of a piece of HTML."""

    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_data(self, data):
        self.found.append(data)


def words(shown):
    return Words(shown._repr_html_()).found


@pytest.fixture
def steps(model):
    return list(stream(model, torch.tensor([1, 2, 3, 1, 2]), tree=8, max_new_tokens=20))


def test_texts_are_escaped():
    hostile = "<script>&amp;"
    assert hostile in words(tree([-1], [hostile]))
    assert hostile in "".join(words(text_by_step(tiny.tokenizer(), [[1]], hostile)))
    assert f" {hostile}: MAT 1.00" in words(mat_over_time(**{hostile: [[1]]}))[1]
    drafted = Stats(drafter=hostile)
    assert hostile in words(drafted)
    shown = [tree([-1], [hostile]), text_by_step(tiny.tokenizer(), [[1]], hostile), drafted]
    assert not any("<script" in each._repr_html_() for each in shown)


def test_mat_over_time_ends_with_the_mat_of_each_run():
    shown = mat_over_time(cold=[[1], [1], [1, 2]], hot=[[1, 2, 3], [1]], none=[])
    assert [text for text in words(shown) if "MAT" in text] == [
        " cold: MAT 1.33 \u2003 ",
        " hot: MAT 2.00 \u2003 ",
        " none: MAT none",
    ]
    dots = re.findall(r'<path d="((?:M[\d. ]+h0)+)"', shown.html)
    assert [each.count("h0") for each in dots] == [3, 2]


def test_stats_show_their_figures(model):
    stats = Stats()
    list(stream(model, torch.tensor([1, 2, 3, 1, 2]), tree=8, max_new_tokens=30, stats=stats))
    said = words(stats)
    assert f"{stats.mat:.2f} tokens a step" in said
    assert any(f"{stats.tokens} tokens in {stats.steps} steps" in text for text in said)
    assert stats.drafter in said
    assert "forward" in said


def test_stats_of_nothing_say_so():
    assert "nothing decoded yet" in words(Stats())


def test_a_step_shows_its_tree_by_ids_and_by_words(steps):
    step = max(steps, key=lambda each: len(each.tokens))
    assert isinstance(step.shown(), Html)
    ids, tokenizer = words(step), tiny.tokenizer()
    assert ids[0] == (
        f"{len(step.draft.tree) - 1} drafted, {len(step.accepted) - 1} accepted, {len(step.tokens)} emitted: "
        "the last one is the model's own"
    )
    assert sorted(ids[1:]) == sorted(map(str, [*step.draft.tokens.tolist(), step.tokens[-1]]))
    assert visible(tokenizer.decode([step.tokens[-1]])) in words(step.shown(tokenizer))
