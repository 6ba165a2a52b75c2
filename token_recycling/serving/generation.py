"""What a request wants to be generated, as the engine takes it; nothing here knows HTTP.

Log-probabilities are those of the model itself, before penalties, biases, temperature and truncation. They are read
from the logits that chose the tokens, so that they cost a softmax for each token; those of a prompt take one more pass
over it. Draft trees change nothing: the logits are those of the path that was accepted.

transformers' own criterion for stop strings (`StopStringCriteria`) makes a table of the whole vocabulary for every
list of stop strings: 2 seconds for 16 of 128 characters and a vocabulary of 8,192. It keeps the table for later
requests with that list, so that one client's request shows in the time of another. Here the output is read as it grows,
some 20 microseconds a token, and nothing is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from ..model.compat import CACHE
from .output import LEAST, Delta, Output, ScoredToken

_CHUNK = 128
"""Tokens of a prompt in one pass: the logits of all of them may need more memory than the model."""


@dataclass(frozen=True, eq=False)
class Generation:
    """The outputs that continue one prompt."""

    ids: torch.Tensor
    """(1, length) int64: the prompt."""
    config: GenerationConfig
    new_output: Callable[[], Output]
    """Creates the reader of each output."""
    n: int = 1
    """Number of outputs."""
    seed: int | None = None
    """Output `i` is sampled with seed + `i`; None: a secret seed for each."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: LogitsProcessor | None = None
    new_grammar: Callable[[], LogitsProcessor] | None = None
    """Creates the processor that constrains an output."""
    logprobs: int | None = None
    """Number of most likely tokens to score at each position; None: no log-probabilities."""
    scores_prompt: bool = False
    """Whether the tokens of the prompt are scored too."""
    prediction: torch.Tensor | None = None
    """(n,) int64: expected output."""
    nodes: int | None = None
    """Maximum number of drafted tokens in a forward pass."""
    reuse: bool = True
    """Whether the prefix cache is read and filled."""

    def arguments(
        self,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        output: Output,
        on_deltas: Callable[[list[Delta]], None],
        check: Callable[[], None],
    ) -> dict[str, Any]:
        """Return the arguments of `generate` for one of the outputs, which is read as `OutputReader` has it."""
        ids, config = self.ids.to(device), copy.deepcopy(self.config)
        recorder = None if self.logprobs is None else LogprobRecorder(self.logprobs)
        reader = OutputReader(output, ids.shape[-1], recorder, on_deltas, check)
        arguments = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "logits_processor": processors(self, config, recorder),
            "generation_config": config,
            "tokenizer": tokenizer,
            "streamer": reader,
        }
        if config.stop_strings:
            config.stop_strings = None
            arguments["stopping_criteria"] = StoppingCriteriaList([reader])
        return arguments


def processors(
    generation: Generation, config: GenerationConfig, recorder: LogprobRecorder | None
) -> LogitsProcessorList:
    """Return the processors of one output, in the order in which they are called. The penalty of repetition moves here
    from the configuration, since the recorder of log-probabilities comes before it.
    """
    chain: list[LogitsProcessor] = [] if recorder is None else [recorder]
    if config.repetition_penalty not in (None, 1.0):
        chain.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        config.repetition_penalty = 1.0
    if generation.frequency_penalty or generation.presence_penalty:
        penalties = generation.frequency_penalty, generation.presence_penalty
        chain.append(AdditivePenalties(*penalties, generation.ids.shape[-1]))
    if generation.bias is not None:
        chain.append(generation.bias)
    if generation.new_grammar is not None:
        chain.append(generation.new_grammar())
    return LogitsProcessorList(chain)


class AdditivePenalties(LogitsProcessor):
    """The penalties of OpenAI's API, for one text, whose prompt has `prompt_tokens`:

        logits[j] -= count[j] * frequency_penalty + (count[j] > 0) * presence_penalty

    `count` is how often the answer has the token; the prompt does not count (platform.openai.com/docs, "Frequency and
    presence penalties"). Cost: a count of the answer's tokens, for every emitted token.
    """

    def __init__(self, frequency: float, presence: float, prompt_tokens: int) -> None:
        self._frequency, self._presence, self._prompt = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[-1])
        return scores - (counts * self._frequency + (counts > 0) * self._presence)


class LogprobRecorder(LogitsProcessor):
    """The first processor of a text: changes nothing, and keeps the distributions until their tokens are known."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._rows: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._rows[input_ids.shape[1]] = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def scored(self, position: int, token: int) -> ScoredToken:
        """The token that was chosen at that position of the text, the prompt included."""
        return _scored(self._rows.pop(position), token, self._top)


@torch.no_grad()
def scored_prompt(model: PreTrainedModel, ids: torch.Tensor, top: int) -> list[ScoredToken]:
    """The tokens of a prompt (1, length), each after those before it."""
    tokens, cache = [ScoredToken(int(ids[0, 0]))], None
    for start in range(0, ids.shape[1] - 1, _CHUNK):
        # The last token is read by the generation: nothing follows it here.
        chunk = ids[:, start : min(start + _CHUNK, ids.shape[1] - 1)]
        output = model(input_ids=chunk, use_cache=True, **{CACHE: cache})
        cache = output[CACHE]
        following = ids[0, start + 1 : start + 1 + chunk.shape[1]].tolist()
        rows = torch.log_softmax(output.logits[0].float(), dim=-1)
        tokens += [_scored(row, token, top) for row, token in zip(rows, following, strict=True)]
    return tokens


def _scored(row: torch.Tensor, token: int, top: int) -> ScoredToken:
    values, tokens = row.topk(min(top, len(row)))
    best = [(one, max(value, LEAST)) for one, value in zip(tokens.tolist(), values.tolist(), strict=True)]
    return ScoredToken(token, max(float(row[token]), LEAST), best)


class OutputReader(StoppingCriteria):
    """Reads the tokens of one output as `generate` chooses them, each once: a streamer, and where there are stop
    strings a criterion too. This loop calls the criterion first, transformers' own the streamer.
    """

    def __init__(
        self,
        output: Output,
        prompt_tokens: int,
        recorder: LogprobRecorder | None,
        on_deltas: Callable[[list[Delta]], None],
        check: Callable[[], None],
    ) -> None:
        """`on_deltas` is called with the delta of each token of a step; `check` with every step and every chunk of a
        prompt, and raises to end the sequence.
        """
        self._output, self._recorder, self._on_deltas, self.reading_prompt = output, recorder, on_deltas, check
        self._read = self._streamed = prompt_tokens
        """Tokens of the sequence that were read, and that the streamer was given."""
        self._prompt_came = False
        self._deltas: list[Delta] = []
        """Of the tokens that were read and not passed on."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether the output ends with a stop string."""
        self._push(input_ids[0, self._read :].tolist())
        return torch.tensor([self._output.stopped], device=input_ids.device)

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: with the prompt first, then with the tokens of each step."""
        self.reading_prompt()
        if not self._prompt_came:
            self._prompt_came = True
            return
        tokens = value.flatten().tolist()
        known = self._read - self._streamed
        self._streamed += len(tokens)
        self._push(tokens[known:])
        deltas, self._deltas = self._deltas, []
        self._on_deltas(deltas)

    def end(self) -> None:
        """Called after the last step; there is nothing to do."""

    def _push(self, tokens: list[int]) -> None:
        for token in tokens:
            scored = ScoredToken(token) if self._recorder is None else self._recorder.scored(self._read, token)
            self._read += 1
            self._deltas.append(self._output.push([scored]))
