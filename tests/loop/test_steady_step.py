"""How many of our files a reader must open to follow one step of the default drafter on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from support import tiny

import token_recycling as tr

PACKAGE = Path(tr.__file__).parent
MOST = 15


class Watch:
    """A streamer that notes in which files functions are called, in each of eight steps."""

    def __init__(self):
        self.put_so_far = 0
        self.steps: list[set[str]] = []

    def put(self, tokens):
        self.put_so_far += 1
        if 8 <= self.put_so_far < 16:
            self.steps.append(set())
            sys.setprofile(self._note)
        else:
            sys.setprofile(None)

    def end(self):
        sys.setprofile(None)

    def _note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            self.steps[-1].add(str(path.relative_to(PACKAGE)))


def test_a_steady_step_passes_few_files():
    model, watch = tr.accelerate(tiny.llama()), Watch()
    model.generate(tiny.prompt(0, 9), max_new_tokens=200, do_sample=False, streamer=watch)
    assert len(watch.steps) == 8
    longest = max(watch.steps, key=len)
    assert {"loop/step.py", "loop/accept.py", "model/tree_model.py", "recycling/ngram_matrix.py"} <= longest
    assert len(longest) <= MOST, "\n".join([f"a steady step passes {len(longest)} files:", *sorted(longest)])
