"""What chains for many requests would bring on cards that are not at hand: replayed, with reckoned pass times.

    python benchmarks/at_scale.py        in an environment with arctic-inference (`make .venv-vllm/.ready`)

The real model answers questions once; its texts and its first candidates at every place are kept in `--texts`. They
are then replayed: 1, 8, 64 and 256 requests at once, each answered one followed by the next, all chains drafted by the
engines' recycler under the same rules as in vLLM, against vLLM's suffix decoding (arctic-inference's own cache, with
vLLM's settings) and no drafts. A pass over n tokens takes the longer of reading the weights and computing:

    t(n) = max(bytes / bandwidth, 2 * parameters * n / arithmetic) + 1 ms

with what an H100 SXM is sold for (3.35 TB/s, 989 TFLOP/s in bfloat16), of which 80 and 60% are taken to be attained.
Not reckoned are keys and values, prompts and our own work. Only accepted tokens teach, since what follows a rejected
one is not known: in an engine ours learns more. Prints one JSON line for each model and number of requests.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.real_model import fetched  # noqa: E402
from token_recycling.bench.run import data as sets  # noqa: E402
from token_recycling.costs.costs import OnlineCurve  # noqa: E402
from token_recycling.engines.replica import EngineOptions, Replica  # noqa: E402
from token_recycling.model.loading import resolved  # noqa: E402
from token_recycling.recycling.ngrams import ngrams_at  # noqa: E402

_MOST = 24
_K = 8
_READ, _COMPUTED, _HOST = 0.8 * 3.35e12, 0.6 * 989e12, 1e-3
MODELS = {"8B, one card": (8e9, 1), "70B, four cards": (70e9, 4)}
AT_ONCE = (1, 8, 64, 256)
WORKS = ("fresh", "again")


class Said(NamedTuple):
    """One answer."""

    prompt: list[int]
    answer: list[int]
    ids: np.ndarray
    """(answer, k) int64: the candidates before each token of the answer, the likeliest first."""
    shares: np.ndarray
    """(answer, k) float32: their probabilities."""


class Drafting(Protocol):
    """Drafts for all requests that are being answered."""

    def draft(self, requests: Sequence[Request]) -> list[list[int]]: ...

    def accepted(self, request: Request, begin: int) -> None:
        """The tokens of the answer from `begin` on are out."""

    def took(self, tokens: int, seconds: float) -> None: ...


class Request:
    """One request on its way."""

    def __init__(self, name: int, said: Said) -> None:
        self.name, self.said, self.written = name, said, 0
        self.tokens = np.array(said.prompt + said.answer, np.int64)

    @property
    def length(self) -> int:
        return len(self.said.prompt) + self.written

    @property
    def left(self) -> int:
        return len(self.said.answer) - self.written


class Nothing:
    """No drafts."""

    def draft(self, requests: Sequence[Request]) -> list[list[int]]:
        return [[] for _ in requests]

    def accepted(self, request: Request, begin: int) -> None: ...

    def took(self, tokens: int, seconds: float) -> None: ...


class Recycled(Nothing):
    """As the adapter for vLLM drafts."""

    def __init__(self, vocabulary: int, seconds: np.ndarray) -> None:
        self._by = Replica(vocabulary, _MOST, EngineOptions(), chains=True, corrected=True)
        self._curve = OnlineCurve(seconds[0] * (1 + EngineOptions.token_cost * np.arange(len(seconds))))

    def draft(self, requests: Sequence[Request]) -> list[list[int]]:
        lengths = np.array([request.length for request in requests])
        tokens = np.zeros((len(requests), lengths.max()), np.int64)
        for row, request in enumerate(requests):
            tokens[row, : request.length] = request.tokens[: request.length]
        rooms = np.array([min(request.left - 1, _MOST) for request in requests])
        texts = [self._by.text_of(request, row[:n]) for request, row, n in zip(requests, tokens, lengths, strict=True)]
        counts = self._by.draft(texts, tokens, np.arange(len(requests)), lengths, rooms, self._curve.seconds)
        return [self._by.chain(text, count) for text, count in zip(texts, counts.tolist(), strict=True)]

    def accepted(self, request: Request, begin: int) -> None:
        said, end = request.said, request.written
        places = np.array([len(said.prompt) + end - 2]), np.array([end - begin])
        self._by.learn(ngrams_at(request.tokens[None], *places, self._by.options.orders), said.ids[begin:end],
                       said.shares[begin:end])  # fmt: skip

    def took(self, tokens: int, seconds: float) -> None:
        self._curve.took(tokens, seconds)


class Suffix(Nothing):
    """As vLLM's suffix decoding drafts."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=_MOST, max_cached_requests=10_000)

    def draft(self, requests: Sequence[Request]) -> list[list[int]]:
        names = {request.name for request in requests}
        for name in set(self._cache.active_requests) - names:
            self._cache.stop_request(name)
        found = []
        for request in requests:
            pattern = request.tokens[max(0, request.length - _MOST) : request.length].astype(np.int32)
            drafted = self._cache.speculate(
                request.name, pattern, max_spec_tokens=min(_MOST, request.left), max_spec_factor=1.0, min_token_prob=0.1
            )
            found.append(list(drafted.token_ids)[: request.left - 1])
        return found

    def accepted(self, request: Request, begin: int) -> None:
        if request.name not in self._cache.active_requests:
            self._cache.start_request(request.name, np.array(request.said.prompt, np.int32))
        self._cache.add_active_response(request.name, request.said.answer[begin : request.written])


def main() -> None:
    """Records what is missing, replays all, prints a line for each model, work and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", action="append", help="questions, as of `token-recycling bench`; may be repeated")
    parser.add_argument("--limit", type=int, default=40, help="questions of a kind at most")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--texts", type=Path, default=ROOT / "build" / "at_scale.pkl")
    arguments = parser.parse_args()
    model = resolved(str(fetched()))
    if not arguments.texts.exists():
        questions = sets.load(arguments.data or ["spec_bench"], arguments.limit)
        recorded = list(record(model, [question.turns[0] for question in questions], arguments.max_new_tokens))
        arguments.texts.parent.mkdir(parents=True, exist_ok=True)
        arguments.texts.write_bytes(pickle.dumps(recorded))
    said: list[Said] = [Said(*each) for each in pickle.loads(arguments.texts.read_bytes())]
    random.Random(0).shuffle(said)
    vocabulary = 1 + max(int(each.ids.max()) for each in said)
    vocabulary = max(vocabulary, 1 + max(max(each.prompt) for each in said))
    for name, (parameters, cards) in MODELS.items():
        for at_once in AT_ONCE:
            seconds = pass_times(parameters, cards, at_once * (_MOST + 1))
            methods = {"none": Nothing(), "suffix": Suffix(), "ours": Recycled(vocabulary, seconds)}
            for turn, work in enumerate(WORKS):
                found = {method: replayed(by, said, at_once, seconds, turn) for method, by in methods.items()}
                plain = found["none"]["seconds"]
                row = {
                    method: {
                        "tokens a step": round(each["tokens"] / each["steps"], 2),
                        "drafted a step": round(each["drafted"] / each["steps"], 2),
                        "speed": round(plain / each["seconds"], 3),
                    }
                    for method, each in found.items()
                    if method != "none"
                }
                print(json.dumps({"model": name, "work": work, "at once": at_once, **row}), flush=True)


def pass_times(parameters: float, cards: int, most: int) -> np.ndarray:
    """(most,) float64: seconds of passes over 1, 2, ... tokens, in bfloat16."""
    computed = 2 * parameters * np.arange(1, most + 1) / (cards * _COMPUTED)
    return np.maximum(2 * parameters / (cards * _READ), computed) + _HOST


def replayed(by: Drafting, said: Sequence[Said], at_once: int, seconds: np.ndarray, turn: int) -> dict[str, float]:
    """Answers all requests, so many at once: tokens, steps (passes times requests), drafted tokens and seconds."""
    waiting = [Request(turn * len(said) + place, each) for place, each in enumerate(said)][::-1]
    going: list[Request] = []
    found = {"tokens": 0.0, "steps": 0.0, "drafted": 0.0, "seconds": 0.0}
    while waiting or going:
        while waiting and len(going) < at_once:
            request = waiting.pop()
            request.written = 1  # with the pass over the prompt
            by.accepted(request, 0)
            going.append(request)
        drafts = by.draft(going)
        verified = len(going) + sum(map(len, drafts))
        time = float(seconds[verified - 1])
        by.took(verified, time)
        for request, draft in zip(going, drafts, strict=True):
            begin, answer = request.written, request.said.answer
            right = 0
            while right < len(draft) and right < request.left - 1 and draft[right] == answer[begin + right]:
                right += 1
            request.written += min(right + 1, request.left)
            by.accepted(request, begin)
            found["tokens"] += request.written - begin
        found["steps"] += len(going)
        found["drafted"] += verified - len(going)
        found["seconds"] += time
        going = [request for request in going if request.left]
    return found


@torch.inference_mode()
def record(name: str, questions: Sequence[str], most: int, together: int = 16) -> Iterator[tuple[Any, ...]]:
    """What the model answers, greedily and in bfloat16, with its candidates: the fields of `Said`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    prompts = sorted((ids for ids in prompts if len(ids) < 1200), key=len)
    ends = model.generation_config.eos_token_id
    for first in range(0, len(prompts), together):
        some = prompts[first : first + together]
        inputs = tokenizer.pad({"input_ids": some}, return_tensors="pt")
        out = model.generate(
            **inputs, max_new_tokens=most, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        tops = [scores.float().softmax(-1).topk(_K) for scores in out.scores]
        ids, shares = torch.stack([top.indices for top in tops], 1), torch.stack([top.values for top in tops], 1)
        for row, prompt in enumerate(some):
            answer = out.sequences[row, inputs["input_ids"].shape[1] :].tolist()
            length = answer.index(ends) + 1 if ends in answer else len(answer)
            if length > 2:
                yield prompt, answer[:length], ids[row, :length].numpy(), shares[row, :length].numpy()
        print(f"{min(first + together, len(prompts))} of {len(prompts)} answered", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
