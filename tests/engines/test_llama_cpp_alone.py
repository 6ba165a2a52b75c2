"""The adapter of llama.cpp with numpy, numba and filelock alone, in a process that refuses every other package.

llama-cpp-python is STOOD IN FOR by the names that the adapter takes from it, with a model that counts: what is shown is
what this package imports and that it drafts and learns; `test_llama_cpp.py` has the real one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2]

LLAMA_CPP = '''
import numpy as np

__version__ = "0.3.36"
LLAMA_VOCAB_TYPE_NONE = 0


def llama_model_is_recurrent(model):
    return False


llama_model_is_hybrid = llama_model_is_recurrent


class Llama:
    """Says the next number, modulo 32; as in llama-cpp-python, logits of all tokens stay in `scores`."""

    model = None
    n_batch = 512

    def __init__(self, draft_model):
        self.draft_model, self.n_tokens, self.passes = draft_model, 0, 0
        self.input_ids, self.scores = np.zeros(512, np.intc), np.zeros((512, 32), np.single)

    def n_ctx(self):
        return 512

    def n_vocab(self):
        return 32

    def eval(self, tokens):
        self.passes += 1
        for token in tokens:
            self.input_ids[self.n_tokens] = token
            self.scores[self.n_tokens] = -np.abs(np.arange(32) - (token + 1) % 32)
            self.n_tokens += 1

    def say(self, prompt, length):
        """Greedily, with the draft model."""
        said, read = list(prompt), 0
        while len(said) < len(prompt) + length:
            self.n_tokens = read
            self.eval([*said[read:], *(self.draft_model(np.array(said, np.intc)).tolist() if read else [])])
            for place in range(len(said) - 1, self.n_tokens):
                said.append(int(self.scores[place].argmax()))
                if place + 1 < self.n_tokens and self.input_ids[place + 1] != said[-1]:
                    break
            read = len(said) - 1
        return said[len(prompt) :][:length]
'''

ALONE = """
import importlib.metadata, sys

ALLOWED = {"numpy", "numba", "llvmlite", "filelock", "token_recycling", "llama_cpp"}
OTHERS = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()} - ALLOWED


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"{name} is refused here", name=name)


assert {"torch", "transformers", "safetensors"} <= OTHERS
before = set(sys.modules)
sys.meta_path.insert(0, Refuse())

import numpy as np
from llama_cpp import Llama
from token_recycling.engines.llama_cpp import TokenRecycling

draft = TokenRecycling(token_cost=0.02)
llama = Llama(draft)
draft.attach(llama)
assert llama.say([3, 4], 200) == [(5 + step) % 32 for step in range(200)]
assert llama.passes < 100, llama.passes
assert draft.recycler.lessons > 30
print(*sorted({name.partition(".")[0] for name in sys.modules.keys() - before} & OTHERS), "and no more")
"""


@pytest.mark.nightly
def test_neither_torch_nor_transformers_nor_safetensors_is_needed(tmp_path):
    stand_in = tmp_path / "llama_cpp"
    stand_in.mkdir()
    (stand_in / "__init__.py").write_text(LLAMA_CPP)
    (stand_in / "llama_speculative.py").write_text("class LlamaDraftModel:\n    pass\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, PACKAGE)))}
    ran = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "and no more"
