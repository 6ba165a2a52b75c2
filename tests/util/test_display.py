"""HTML shown in notebooks: every figure and text is present and escaped."""

from collections import Counter
from html.parser import HTMLParser

import torch
from support import tiny

from token_recycling import Stats, stream
from token_recycling._util.display import mat_over_time, text_by_step, tree, visible


def words(shown):
    """Return the text nodes of the HTML of an object."""
    found, parser = [], HTMLParser()
    parser.handle_data = found.append
    parser.feed(shown._repr_html_())
    return found


def test_texts_are_escaped():
    hostile = "<script>&amp;"
    assert words(tree([-1, 0, 0, 1], ["a", "b", hostile, "c"], [0, 2])) == ["a", hostile, "b", "c"], "accepted first"
    assert hostile in "".join(words(text_by_step(tiny.tokenizer(), [[1]], hostile)))
    assert f" {hostile}: MAT 1.00" in words(mat_over_time(**{hostile: [[1]]}))[1]
    assert hostile in words(Stats(drafter=hostile))


def test_figures_are_those_of_the_run(model):
    stats, tokenizer = Stats(), tiny.tokenizer()
    assert "nothing decoded yet" in words(stats)
    steps = list(stream(model, torch.tensor([1, 2, 3, 1, 2]), tree=8, max_new_tokens=30, stats=stats))
    shown = words(stats)
    assert f"{stats.mat:.2f} tokens a step" in shown
    emitted, by_depth, end = map(shown.index, ("steps by emitted tokens", "accepted by depth, %", "ms a step"))
    lengths = {str(length): stats.lengths[length] for length in range(1, max(stats.lengths) + 1)}
    depths = {str(depth): f"{100 * share:.3g}" for depth, share in stats.acceptance_by_depth.items()}
    assert max(len(lengths), len(depths)) <= 8, "every value has a bar"
    assert shown[emitted + 1 : by_depth] == [text for pair in lengths.items() for text in map(str, pair)]
    assert shown[by_depth + 1 : end] == [text for pair in depths.items() for text in pair]
    (mat,) = [text for text in words(mat_over_time(run=[step.tokens for step in steps])) if "MAT" in text]
    assert f"run: MAT {stats.mat:.2f}" in mat
    step = max(steps, key=lambda each: len(each.tokens))
    (summary, *ids) = words(step)
    drafted, accepted = len(step.draft) - 1, len(step.accepted) - 1
    assert summary.startswith(f"{drafted} drafted, {accepted} accepted, {len(step.tokens)} emitted")
    assert sorted(ids) == sorted(map(str, [*step.draft.tokens.tolist(), step.tokens[-1]]))
    assert visible(tokenizer.decode([step.tokens[-1]])) in words(step.shown(tokenizer))


def test_bars_of_emitted_tokens_count_every_step_once():
    shown = words(Stats(steps=7, lengths=Counter({1: 1, 7: 1, 8: 2, 9: 1, 30: 2})))
    begin, end = map(shown.index, ("steps by emitted tokens", "accepted by depth, %"))
    bars = dict(zip(shown[begin + 1 : end : 2], shown[begin + 2 : end : 2], strict=True))
    assert {length: steps for length, steps in bars.items() if steps != "0"} == {
        "1": "1",
        "7": "1",
        "8": "2",
        "more": "3",
    }
