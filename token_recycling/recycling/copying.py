"""Edit-aware copying: drafts resume after an edit, from the place that a sequence is copied from.

An output that repeats a file, a tool's result or a prediction leaves the copied text at an edit and soon returns to it.
There, the last copied place predicts the continuation better than matches elsewhere. So every sequence tracks the place
of the next token to copy. Where the output differs, copying resumes after as many tokens (a replacement), at the same
place (an insertion), or after the next place that matches the newest tokens, the nearest of the longest matches. After
a replacement, old and new tokens form a rule: a name that was replaced once is replaced again. Each node of a draft has
its own places, so a draft continues after its own replacements.

Cost, in compiled code: tens of nanoseconds per token and place; a microsecond per token within an edit.
"""

from __future__ import annotations

import numpy as np

from .._util.compiled import Record, compiled_part
from .ngrams import ABSENT
from .suffix_index import BREAK, IndexArrays, token_at

HYPOTHESES = 3
"""Maximum number of places where copying may continue."""
KINDS = 7
"""Kinds by the tokens copied in a row: none, 1, 2 to 3, 4 to 7, more; by a rule; at the start of a prediction."""
_BY_RULE, _AT_BEGINNING = 5, 6
_WEIGHTS = np.array([0.06, 0.35, 0.55, 0.75, 0.85, 0.6, 0.6], np.float32)
"""Weight of copied tokens relative to all other candidates, by kind."""
_WINDOW, _COMPARED = 64, 8
"""Tokens after the last copied place that are searched for the newest tokens, and maximum tokens compared."""
_SHORT, _LOST = 8, 128
"""Tokens since the last copied one after which no place is guessed, and after which copying ends."""
_AGAIN, _FOUND, _ELSEWHERE = 2, 6, 8
"""Matching tokens required to resume copying; to start copying; to leave an edit for another place."""
_RULES, _LONGEST_RULE = 16, 8
"""Number of newest rules that are kept, and maximum tokens of either side."""

COPY = np.dtype(
    [
        ("place", np.int64),  # the next token to copy, or -1
        ("run", np.int64),  # tokens copied in a row; -1 at the start of a prediction
        ("rule", np.int64),  # the rule being applied
        ("done", np.int64),  # number of its tokens applied
    ],
    align=True,
)
"""Where copying may continue after a node of a draft."""
_RULE = np.dtype(
    [
        ("old", np.int64),
        ("new", np.int64),  # numbers of tokens
        ("right", np.int64),
        ("wrong", np.int64),  # how often the rule was right and wrong
        ("old_tokens", np.int64, (_LONGEST_RULE,)),
        ("new_tokens", np.int64, (_LONGEST_RULE,)),
    ],
    align=True,
)
"""A replacement of tokens by others."""
COPYING = np.dtype(
    [
        ("place", np.int64),  # the next token to copy, or the first not copied
        ("run", np.int64),  # tokens copied in a row
        ("gap", np.int64),  # tokens since the last copied one
        ("rule", np.int64),  # the rule being applied
        ("done", np.int64),  # number of its tokens applied
        ("made", np.int64),  # number of rules so far
        ("predicted", np.int64),  # predicted tokens that the sequence contained
        ("prediction", np.int64),  # length of the prediction
        ("prompt", np.int64),  # length of the prompt, whose tokens are never copied from anything
        ("rules", _RULE, (_RULES,)),
    ],
    align=True,
)
"""State of one sequence."""


def predict(copying: np.ndarray, prompt: int, prediction: int) -> None:
    """Initialize the state of a new sequence, (1,) of `COPYING`, with the lengths of prompt and prediction; copying
    starts at the beginning of the index.
    """
    copying["place"], copying["prompt"], copying["prediction"] = 0, prompt, prediction


def predicted(copying: np.ndarray) -> int:
    """Return how many predicted tokens a sequence, (1,) of `COPYING`, has copied."""
    return int(min(copying["predicted"][0], copying["prediction"][0]))


@compiled_part
def follow(copying: Record, index: IndexArrays, token: int) -> None:
    """Update the state with the next `token` of the sequence, which is not in the index yet."""
    if copying.place < 0:
        return
    if copying.gap == 0:
        rule, done = copying.rule, copying.done
        if done == 0:
            rule = _rule_at(copying, index, copying.place)
        if rule >= 0 and copying.rules[rule].new_tokens[done] == token:
            copying.rule, copying.done, copying.run = rule, done + 1, copying.run + 1
            if done + 1 == copying.rules[rule].new:
                copying.rules[rule].right += 1
                copying.place, copying.done = copying.place + copying.rules[rule].old, 0
        else:
            if rule >= 0:
                copying.rules[rule].wrong += 1
            copying.done = 0
            if done == 0 and token_at(index, copying.place) == token:
                _copied(copying, copying.place, 1)
                copying.run += 1
            else:
                copying.gap, copying.run = done + 1, 0
        return
    copying.gap += 1
    at, length = _taken_up(copying, index, token)
    length = min(length, copying.gap, at + 1 - copying.place)
    if length >= _AGAIN:
        _learn(copying, index, at + 1 - length, copying.gap - length)
        _copied(copying, at + 1 - length, length)
        copying.run, copying.gap = length, 0
    elif copying.gap > _LOST:
        copying.place = ABSENT


@compiled_part
def _copied(copying: Record, place: int, tokens: int) -> None:
    copying.place = place + tokens
    if place < copying.prediction:
        copying.predicted += tokens


@compiled_part
def _taken_up(copying: Record, index: IndexArrays, token: int) -> tuple[int, int]:
    """Return the place and length of the longest match of the newest tokens, `token` included, near the last copied
    place; length 0 without a match.
    """
    best, longest, count = np.int64(ABSENT), np.int64(0), index.added[0]
    for at in range(max(np.int64(0), copying.place - 1), min(copying.place + _WINDOW, count)):
        if token_at(index, at) != token:
            if token_at(index, at) == BREAK:
                break
            continue
        length = np.int64(1)
        while length < _COMPARED and at - length >= 0 and count - length >= 0:
            before = token_at(index, at - length)
            if before < 0 or before != token_at(index, count - length):
                break
            length += 1
        if length > longest:
            best, longest = np.int64(at), length
    return best, longest


@compiled_part
def _learn(copying: Record, index: IndexArrays, again: int, new: int) -> None:
    """Learn a rule: `new` tokens replaced those between the last copied place and `again`. The newest token is not in
    the index yet.
    """
    begin, old = copying.place, again - copying.place
    if not 1 <= new <= _LONGEST_RULE or not 1 <= old <= _LONGEST_RULE or token_at(index, begin) < 0:
        return
    first, rule = index.added[0] + 1 - copying.gap, copying.rules[copying.made % _RULES]
    copying.made += 1
    rule.old, rule.new, rule.right, rule.wrong = old, new, 1, 0
    for place in range(old):
        rule.old_tokens[place] = token_at(index, begin + place)
    for place in range(new):
        rule.new_tokens[place] = token_at(index, first + place)


@compiled_part
def _rule_at(copying: Record, index: IndexArrays, place: int) -> int:
    """Return the newest rule that applies at a place and was right at least as often as wrong, or -1."""
    for back in range(min(copying.made, np.int64(_RULES))):
        number = (copying.made - 1 - back) % _RULES
        rule = copying.rules[number]
        same = rule.wrong <= rule.right
        for old in range(rule.old):
            if token_at(index, place + old) != rule.old_tokens[old]:
                same = False
                break
        if same:
            return number
    return np.int64(-1)


@compiled_part
def begin_draft(copying: Record, index: IndexArrays, tree: np.ndarray) -> None:
    """Set where copying may continue after the root of a tree."""
    copies = tree[0].copies
    for row in range(HYPOTHESES):
        copies[row].place = ABSENT
    if copying.place < 0:
        return
    if copying.gap == 0:
        _set(copies[0], copying.place, copying.run if copying.run > 0 else -1, copying.rule, copying.done)
        return
    count, filled, late = index.added[0], 0, copying.gap > _SHORT
    # The newest token is indexed by now: search as if it were not.
    newest = token_at(index, count - 1)
    index.added[0] = count - 1
    at, length = _taken_up(copying, index, newest)
    index.added[0] = count
    if length >= (_AGAIN if late else 1):
        _set(copies[0], at + 1, length, 0, 0)
        filled = 1
    if not late:
        for place in (copying.place + copying.gap, copying.place):
            if filled == 0 or copies[0].place != place:
                _set(copies[filled], place, 0, 0, 0)
                filled += 1


@compiled_part
def _set(copy: Record, place: int, run: int, rule: int, done: int) -> None:
    copy.place, copy.run, copy.rule, copy.done = place, run, rule, done


@compiled_part
def find(copying: Record, tree: np.ndarray, place: int, length: int) -> None:
    """Given that the newest tokens match those before `place`, start copying there, or leave an edit for it."""
    if length >= (_FOUND if copying.place < 0 else _ELSEWHERE) and (copying.place < 0 or copying.gap > 0):
        copying.place, copying.run, copying.gap, copying.done = place, length, 0, 0
        copies = tree[0].copies
        _set(copies[0], place, length, 0, 0)
        copies[1].place = copies[2].place = ABSENT


@compiled_part
def token_to_copy(copying: Record, index: IndexArrays, copy: Record) -> tuple[int, int]:
    """Return the token to copy at one of the places of a node, -1 for none, and its kind."""
    place, run, rule, done = copy.place, copy.run, copy.rule, copy.done
    if place < 0:
        return np.int64(ABSENT), np.int64(0)
    if done == 0:
        rule = _rule_at(copying, index, place)
    if rule >= 0:
        return copying.rules[rule].new_tokens[done], np.int64(_BY_RULE)
    if run == -1:
        return token_at(index, place), np.int64(_AT_BEGINNING)
    return token_at(index, place), np.int64(0 if run < 1 else 1 if run < 2 else 2 if run < 4 else 3 if run < 8 else 4)


@compiled_part
def weight(kind: int) -> float:
    """Return the weight of a copied token relative to all other candidates."""
    return _WEIGHTS[kind]


@compiled_part
def continue_copies(copying: Record, index: IndexArrays, tree: np.ndarray, parent: int, node: int, token: int) -> None:
    """Set where copying may continue after `node`, which has `token` and follows `parent`."""
    filled, copies, above = 0, tree[node].copies, tree[parent].copies
    for row in range(HYPOTHESES):
        copies[row].place = ABSENT
    for row in range(HYPOTHESES):
        copy = above[row]
        place, run, rule, done = copy.place, max(copy.run, np.int64(0)), copy.rule, copy.done
        if place < 0:
            continue
        if done == 0:
            rule = _rule_at(copying, index, place)
        if rule >= 0 and copying.rules[rule].new_tokens[done] == token:
            done += 1
            if done == copying.rules[rule].new:
                place, done = place + copying.rules[rule].old, np.int64(0)
        elif done == 0 and token_at(index, place) == token:
            place += 1
        else:
            continue
        _set(copies[filled], place, run + 1, max(rule, 0), done)
        filled += 1
    first = above[0]
    if filled == 0 and first.place >= 0 and first.run >= _AGAIN and first.done == 0:
        _set(copies[0], first.place + 1, 0, 0, 0)
        _set(copies[1], first.place, 0, 0, 0)
