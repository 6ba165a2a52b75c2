"""Edit-aware copying: drafts resume after an edit, from the place that a sequence is copied from.

An output that repeats a file, a tool's result or a prediction leaves it at an edit and soon returns to it. Matches
elsewhere say little there; the last copied place says a lot. So every sequence keeps the place of the next token to
copy. Where the output differs, copying resumes after as many tokens (a replacement), at the same place (an insertion),
or after the next place that matches the newest tokens, the nearest of the longest matches. After a replacement, old and
new tokens form a rule: a name that was replaced once is replaced again. Each node of a draft has places of its own, so
that a draft continues after its own replacements.

Cost, in compiled code: tens of nanoseconds per token and place; a microsecond per token within an edit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled_part
from .ngrams import ABSENT
from .suffix_index import BREAK, IndexArrays, token_at

HYPOTHESES = 3
"""Most places where copying may continue."""
KINDS = 7
"""By how many tokens were copied in a row: none, 1, 2 to 3, 4 to 7, more; by a rule; at the start of a prediction."""
_BY_RULE, _AT_BEGINNING = 5, 6
_WEIGHTS = np.array([0.06, 0.35, 0.55, 0.75, 0.85, 0.6, 0.6], np.float32)
"""Weight of tokens to copy against all other candidates, by kind."""
_WINDOW, _COMPARED = 64, 8
"""Tokens after the last copied place that are searched for the newest ones, and most tokens compared."""
_SHORT, _LOST = 8, 128
"""Tokens since the last copied one after which no place is guessed, and after which copying ends."""
_AGAIN, _FOUND, _ELSEWHERE = 2, 6, 8
"""Matching tokens with which copying resumes; with which it begins; with which it leaves an edit for another place."""
_RULES, _LONGEST_RULE = 16, 8
"""Newest rules that are kept, and most tokens of either side."""

_PLACE, _RUN, _GAP, _RULE, _DONE, _MADE, _PREDICTED, _PREDICTION, _FROM = range(9)
"""Fields of a sequence's state: the next place to copy, or the first that was not copied; tokens copied in a row;
tokens since then; the rule being followed, and how many of its tokens; number of rules so far; predicted tokens found,
length of the prediction, length of the prompt.
"""
_OLD, _NEW, _RIGHT, _WRONG, _TOKENS = range(5)
"""Fields of a rule: numbers of old and new tokens, how often it held and failed, its tokens."""


class Copying(NamedTuple):
    """State of one sequence."""

    state: np.ndarray  # (9,) int64
    rules: np.ndarray  # (_RULES, 20) int64

    @classmethod
    def empty(cls) -> Copying:
        return cls(np.zeros(9, np.int64), np.zeros((_RULES, _TOKENS + 2 * _LONGEST_RULE), np.int64))

    def begin(self, prompt: int, prediction: int = 0) -> None:
        """Start a sequence with a prompt and a prediction of so many tokens; copying starts at the beginning of the
        index.
        """
        self.state[:] = 0
        self.state[_PLACE], self.state[_FROM] = 0 if prediction else ABSENT, prompt
        self.state[_PREDICTION] = prediction

    @property
    def active(self) -> bool:
        """Whether tokens may be copied from somewhere."""
        return bool(self.state[_PLACE] >= 0)

    @property
    def predicted(self) -> int:
        """How many predicted tokens the sequence contained."""
        return int(min(self.state[_PREDICTED], self.state[_PREDICTION]))


@compiled_part
def follows_from(copying: Copying) -> int:
    """Return the length of the prompt, whose tokens are never copied from anything."""
    return copying.state[_FROM]


@compiled_part
def follow(copying: Copying, index: IndexArrays, token: int) -> None:
    """Continue the sequence with `token`, which is not in its index yet."""
    state, rules = copying
    if state[_PLACE] < 0:
        return
    if state[_GAP] == 0:
        rule, done = state[_RULE], state[_DONE]
        if done == 0:
            rule = _rule_at(copying, index, state[_PLACE])
        if rule >= 0 and rules[rule, _TOKENS + _LONGEST_RULE + done] == token:
            state[_RULE], state[_DONE], state[_RUN] = rule, done + 1, state[_RUN] + 1
            if done + 1 == rules[rule, _NEW]:
                rules[rule, _RIGHT] += 1
                state[_PLACE], state[_DONE] = state[_PLACE] + rules[rule, _OLD], 0
        else:
            if rule >= 0:
                rules[rule, _WRONG] += 1
            state[_DONE] = 0
            if done == 0 and token_at(index, state[_PLACE]) == token:
                _copied(state, state[_PLACE], 1)
                state[_RUN] += 1
            else:
                state[_GAP], state[_RUN] = done + 1, 0
        return
    state[_GAP] += 1
    at, length = _taken_up(state, index, token)
    length = min(length, state[_GAP], at + 1 - state[_PLACE])
    if length >= _AGAIN:
        _learn(copying, index, at + 1 - length, state[_GAP] - length)
        _copied(state, at + 1 - length, length)
        state[_RUN], state[_GAP] = length, 0
    elif state[_GAP] > _LOST:
        state[_PLACE] = ABSENT


@compiled_part
def _copied(state: np.ndarray, place: int, tokens: int) -> None:
    state[_PLACE] = place + tokens
    if place < state[_PREDICTION]:
        state[_PREDICTED] += tokens


@compiled_part
def _taken_up(state: np.ndarray, index: IndexArrays, token: int) -> tuple[int, int]:
    """Return place and length of the longest match of the newest tokens, `token` included, near the last copied place;
    length 0 without one.
    """
    best, longest, count = np.int64(ABSENT), np.int64(0), index.added[0]
    for at in range(max(np.int64(0), state[_PLACE] - 1), min(state[_PLACE] + _WINDOW, count)):
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
def _learn(copying: Copying, index: IndexArrays, again: int, new: int) -> None:
    """Learn a rule: `new` tokens replaced those from the last copied place up to `again`. The newest token is not in
    the index yet.
    """
    state, rules = copying
    begin, old = state[_PLACE], again - state[_PLACE]
    if not 1 <= new <= _LONGEST_RULE or not 1 <= old <= _LONGEST_RULE or token_at(index, begin) < 0:
        return
    first, rule = index.added[0] + 1 - state[_GAP], state[_MADE] % _RULES
    state[_MADE] += 1
    rules[rule, _OLD], rules[rule, _NEW], rules[rule, _RIGHT], rules[rule, _WRONG] = old, new, 1, 0
    for place in range(old):
        rules[rule, _TOKENS + place] = token_at(index, begin + place)
    for place in range(new):
        rules[rule, _TOKENS + _LONGEST_RULE + place] = token_at(index, first + place)


@compiled_part
def _rule_at(copying: Copying, index: IndexArrays, place: int) -> int:
    """Return the newest rule whose old tokens are at a place and that held more often than not, or -1."""
    state, rules = copying
    made = state[_MADE]
    for back in range(min(made, np.int64(_RULES))):
        rule = (made - 1 - back) % _RULES
        same = rules[rule, _WRONG] <= rules[rule, _RIGHT]
        for old in range(rules[rule, _OLD]):
            if token_at(index, place + old) != rules[rule, _TOKENS + old]:
                same = False
                break
        if same:
            return rule
    return np.int64(-1)


@compiled_part
def begin_draft(copying: Copying, index: IndexArrays, places: np.ndarray) -> None:
    """Fill `places` (nodes, HYPOTHESES, 4) int64 with where copying may continue after the root: a place or -1, tokens
    in a row (-1: at the beginning of a prediction), a rule, and how many of its tokens.
    """
    state = copying.state
    for row in range(HYPOTHESES):
        places[0, row, 0] = ABSENT
    if state[_PLACE] < 0:
        return
    if state[_GAP] == 0:
        _set_place(places, 0, 0, state[_PLACE], state[_RUN] if state[_RUN] > 0 else -1, state[_RULE], state[_DONE])
        return
    count, found, late = index.added[0], 0, state[_GAP] > _SHORT
    # The newest token is in the index by now: look for it as before.
    newest = token_at(index, count - 1)
    index.added[0] = count - 1
    at, length = _taken_up(state, index, newest)
    index.added[0] = count
    if length >= (_AGAIN if late else 1):
        _set_place(places, 0, 0, at + 1, length, 0, 0)
        found = 1
    if not late:
        for place in (state[_PLACE] + state[_GAP], state[_PLACE]):
            if found == 0 or places[0, 0, 0] != place:
                _set_place(places, 0, found, place, 0, 0, 0)
                found += 1


@compiled_part
def _set_place(places: np.ndarray, node: int, row: int, place: int, run: int, rule: int, done: int) -> None:
    places[node, row, 0], places[node, row, 1], places[node, row, 2], places[node, row, 3] = place, run, rule, done


@compiled_part
def find(copying: Copying, places: np.ndarray, place: int, length: int) -> None:
    """The newest tokens match those before `place`: start to copy there, or leave an edit for it."""
    state = copying.state
    if length >= (_FOUND if state[_PLACE] < 0 else _ELSEWHERE) and (state[_PLACE] < 0 or state[_GAP] > 0):
        state[_PLACE], state[_RUN], state[_GAP], state[_DONE] = place, length, 0, 0
        _set_place(places, 0, 0, place, length, 0, 0)
        places[0, 1, 0] = places[0, 2, 0] = ABSENT


@compiled_part
def candidate(copying: Copying, index: IndexArrays, places: np.ndarray, node: int, row: int) -> tuple[int, int]:
    """Return the token to copy at one of the places of a node, -1 for none, and its kind; see `begin_draft`."""
    place, run, rule, done = places[node, row, 0], places[node, row, 1], places[node, row, 2], places[node, row, 3]
    if place < 0:
        return np.int64(ABSENT), np.int64(0)
    if done == 0:
        rule = _rule_at(copying, index, place)
    if rule >= 0:
        return copying.rules[rule, _TOKENS + _LONGEST_RULE + done], np.int64(_BY_RULE)
    if run == -1:
        return token_at(index, place), np.int64(_AT_BEGINNING)
    return token_at(index, place), np.int64(0 if run < 1 else 1 if run < 2 else 2 if run < 4 else 3 if run < 8 else 4)


@compiled_part
def weight(kind: int) -> float:
    """Return the weight of a token to copy against all other candidates."""
    return _WEIGHTS[kind]


@compiled_part
def go_on(copying: Copying, index: IndexArrays, places: np.ndarray, parent: int, node: int, token: int) -> None:
    """Fill in where copying may continue after `node`, which has `token` and follows `parent`; see `begin_draft`."""
    found, rules = 0, copying.rules
    for row in range(HYPOTHESES):
        places[node, row, 0] = ABSENT
    for row in range(HYPOTHESES):
        place, run = places[parent, row, 0], max(places[parent, row, 1], np.int64(0))
        rule, done = places[parent, row, 2], places[parent, row, 3]
        if place < 0:
            continue
        if done == 0:
            rule = _rule_at(copying, index, place)
        if rule >= 0 and rules[rule, _TOKENS + _LONGEST_RULE + done] == token:
            done += 1
            if done == rules[rule, _NEW]:
                place, done = place + rules[rule, _OLD], np.int64(0)
        elif done == 0 and token_at(index, place) == token:
            place += 1
        else:
            continue
        _set_place(places, node, found, place, run + 1, max(rule, 0), done)
        found += 1
    place = places[parent, 0, 0]
    if found == 0 and place >= 0 and places[parent, 0, 1] >= _AGAIN and places[parent, 0, 3] == 0:
        _set_place(places, node, 0, place + 1, 0, 0, 0)
        _set_place(places, node, 1, place, 0, 0, 0)
