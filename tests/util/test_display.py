"""What notebooks show: every figure and text is there, escaped."""

from html.parser import HTMLParser

import torch
from support import tiny

from token_recycling import Stats, stream
from token_recycling._util.display import mat_over_time, text_by_step, tree, visible


def words(shown):
    """The texts of what is shown, as HTML."""
    found, parser = [], HTMLParser()
    parser.handle_data = found.append
    parser.feed(shown._repr_html_())
    return found


def test_texts_are_escaped():
    hostile = "<script>&amp;"
    assert hostile in words(tree([-1], [hostile]))
    assert hostile in "".join(words(text_by_step(tiny.tokenizer(), [[1]], hostile)))
    assert f" {hostile}: MAT 1.00" in words(mat_over_time(**{hostile: [[1]]}))[1]
    assert hostile in words(Stats(drafter=hostile))


def test_figures_are_those_of_the_run(model):
    stats, tokenizer = Stats(), tiny.tokenizer()
    assert "nothing decoded yet" in words(stats)
    steps = list(stream(model, torch.tensor([1, 2, 3, 1, 2]), tree=8, max_new_tokens=30, stats=stats))
    assert f"{stats.mat:.2f} tokens a step" in words(stats)
    (mat,) = [text for text in words(mat_over_time(run=[step.tokens for step in steps])) if "MAT" in text]
    assert f"run: MAT {stats.mat:.2f}" in mat
    step = max(steps, key=lambda each: len(each.tokens))
    (_, *ids) = words(step)
    assert sorted(ids) == sorted(map(str, [*step.draft.tokens.tolist(), step.tokens[-1]]))
    assert visible(tokenizer.decode([step.tokens[-1]])) in words(step.shown(tokenizer))
