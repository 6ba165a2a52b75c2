"""Token Recycling in llama-cpp-python next to its own prompt lookup and none: `make bench-llama-cpp`.

SmolLM2-135M-Instruct, as its file has it (4 bits), with 8 bits and in float32, answers questions greedily: `fresh` are
five of the demo's, or those of `--data`, with one `Llama` and one drafter for each method; `again` the same ones once
more; `edit` the demo's edit of a file. Methods take turns from question to question. MAT is tokens a pass, the one over
the prompt left out; `speed` how many times as fast as without drafts, by processor time after the first token; `parted`
the answers that are not those without drafts, and `margin` by how much in logits, at most, the token said there without
drafts was ahead of the other one. One JSON line for each method and kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.gguf_files import write_gguf  # noqa: E402

from benchmarks.real_model import fetched  # noqa: E402
from token_recycling import load  # noqa: E402
from token_recycling.bench.run import data as sets  # noqa: E402
from token_recycling.engines.llama_cpp import TokenRecycling  # noqa: E402

METHODS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "prompt lookup (10)": LlamaPromptLookupDecoding,
    "prompt lookup (2)": lambda: LlamaPromptLookupDecoding(num_pred_tokens=2),
    "Token Recycling": TokenRecycling,
    "Token Recycling, token_cost 0.2": lambda: TokenRecycling(token_cost=0.2),
}

WEIGHTS = {"Q4_1": None, "Q8_0": GGMLQuantizationType.Q8_0, "F32": GGMLQuantizationType.F32}
"""What the files hold; the first is as it comes, the others are written from it."""
EDIT = "edit"
"""The demo's question that asks for an edit."""


def main() -> None:
    """Measures all methods on all files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", choices=WEIGHTS, action="append", help="may be repeated; all by default")
    parser.add_argument("--method", choices=METHODS, action="append", help="beside none; may be repeated")
    parser.add_argument("--data", action="append", help="NAME=FILE: questions in place of the demo's; may be repeated")
    parser.add_argument("--limit", type=int, default=2, help="questions of every category of the data")
    arguments = parser.parse_args()
    packed = fetched()
    model, tokenizer = load(packed)
    texts = {path.stem: path.read_text() for path in sorted((ROOT / "examples" / "demo").glob("*.txt"))}
    if arguments.data:
        asked = {question.name: question.turns[0] for question in sets.load(arguments.data, arguments.limit)}
        texts = {**asked, EDIT: texts[EDIT]}
    chats = {
        name: tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for name, text in texts.items()
    }
    fresh = sorted(chats.keys() - {EDIT})
    methods = {"none": METHODS["none"], **{name: METHODS[name] for name in arguments.method or METHODS}}
    with tempfile.TemporaryDirectory() as folder:
        for weights in arguments.weights or WEIGHTS:
            path, kept = packed, WEIGHTS[weights]
            if kept is not None:
                path = Path(folder) / f"{weights}.gguf"
                write_gguf(model, path, tokenizer.convert_ids_to_tokens(range(model.config.vocab_size)), kind=kept)
            said = {name: Said(path, make(), arguments) for name, make in methods.items()}
            for kind, names in {"fresh": fresh, "again": fresh, EDIT: [EDIT]}.items():
                for name, (method, one) in itertools.product(names, said.items()):
                    text = one.answer(chats[name])
                    if method == "none":
                        wanted = text
                    elif (at := first_difference(wanted, text)) is not None:
                        one.margins.append(said["none"].margin(len(chats[name]) + at, wanted[at], text[at]))
                plain = said["none"].seconds_a_token
                for method, one in said.items():
                    print(
                        json.dumps({"weights": weights, "kind": kind, "method": method, **one.found(plain)}), flush=True
                    )


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Where two texts part; None where they do not, or one is a part of the other."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), None)


class Said:
    """One method, with what it said since the figures were asked for last."""

    def __init__(self, path: Path, draft: Any, arguments: argparse.Namespace) -> None:
        threads, self._tokens = arguments.threads, arguments.max_new_tokens
        self._llama = Llama(
            str(path), n_ctx=4096, draft_model=draft, logits_all=True, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip
        if isinstance(draft, TokenRecycling):
            draft.attach(self._llama)
        evaluate = self._llama.eval

        def counting(tokens: list[int]) -> None:
            self._passes, self._evaluated = self._passes + 1, self._evaluated + len(tokens)
            evaluate(tokens)

        self._llama.eval = counting
        self._begin()

    def _begin(self) -> None:
        self._generated = self._passes = self._evaluated = 0
        self._seconds = 0.0
        self.margins = list[float]()
        """Of the texts that parted from others."""

    def answer(self, prompt: list[int]) -> list[int]:
        """Answers a prompt; the pass over it counts neither as a pass nor as time."""
        generating = self._llama.generate(prompt, temp=0)
        before = self._passes, self._evaluated
        first = next(generating)
        self._passes, self._evaluated = before
        began = time.process_time()
        ends = (self._llama.token_eos(), 2)  # the end of a turn, which a file that was written here does not name
        text = [*itertools.takewhile(lambda token: token not in ends, itertools.islice(generating, self._tokens))]
        self._seconds += time.process_time() - began
        self._generated += len(text)
        return [first, *text]

    def margin(self, slot: int, token: int, other: int) -> float:
        """By how much a token was ahead of another one in the last text, where its token of this slot was chosen."""
        logits = self._llama.scores[slot - 1]
        return float(logits[token] - logits[other])

    @property
    def seconds_a_token(self) -> float:
        return self._seconds / self._generated

    def found(self, plain: float) -> dict[str, Any]:
        """The figures, against so many seconds a token without drafts; then it begins anew."""
        found = {
            "tokens": self._generated,
            "mat": round(self._generated / self._passes, 2),
            "drafted": self._evaluated - self._passes,
            "speed": round(plain / self.seconds_a_token, 2),
            "parted": len(self.margins),
            "margin": round(max(self.margins, default=0.0), 2),
        }
        self._begin()
        return found


if __name__ == "__main__":
    main()
