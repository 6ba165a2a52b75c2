"""The generations of a request, independent of HTTP.

Log-probabilities are those of the model itself, before penalties, biases, temperature and truncation. They are computed
from the logits of the accepted path, at the cost of one softmax per token. Those of a prompt take another forward pass
over the prompt.

transformers' own criterion for stop strings (`StopStringCriteria`) builds a table over the whole vocabulary for every
list of stop strings: 2 seconds for 16 strings of 128 characters and a vocabulary of 8,192. It caches the table for
later requests with that list, so response times reveal another client's list. Here the output text is matched as it
grows, at about 20 microseconds per token, and nothing is cached.
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
"""Prompt tokens per forward pass: the logits of a whole prompt may need more memory than the model."""


@dataclass(frozen=True, eq=False)
class Generation:
    """The outputs to generate for one prompt."""

    ids: torch.Tensor
    """(1, length) int64: the prompt."""
    config: GenerationConfig
    new_output: Callable[[], Output]
    """Creates the reader of each output."""
    n: int = 1
    """Number of outputs."""
    seed: int | None = None
    """Output `i` is sampled with seed + `i`; None: a secret random seed for each output."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: LogitsProcessor | None = None
    new_grammar: Callable[[], LogitsProcessor] | None = None
    """Creates the processor that constrains an output."""
    logprobs: int | None = None
    """Number of most probable tokens to score at each position; None: no log-probabilities."""
    scores_prompt: bool = False
    """Whether the prompt tokens get log-probabilities too."""
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
        """Return the arguments of `generate` for one of the outputs. `on_deltas` and `check`: see `OutputReader`."""
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
    """Return the logits processors of one output, in calling order. The repetition penalty moves here from the
    configuration, since the recorder of log-probabilities must come before it.
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
    """The penalties of OpenAI's API, for one sequence, whose prompt has `prompt_tokens` tokens:

        logits[j] -= count[j] * frequency_penalty + (count[j] > 0) * presence_penalty

    `count[j]` is the number of occurrences of token j in the output; the prompt is excluded (platform.openai.com/docs,
    "Frequency and presence penalties"). Cost: every emitted token counts the whole output again.
    """

    def __init__(self, frequency: float, presence: float, prompt_tokens: int) -> None:
        self._frequency, self._presence, self._prompt = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[-1])
        return scores - (counts * self._frequency + (counts > 0) * self._presence)


class LogprobRecorder(LogitsProcessor):
    """The first logits processor of a sequence: only stores each log-softmax until its token is known."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._rows: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._rows[input_ids.shape[1]] = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def scored(self, position: int, token: int) -> ScoredToken:
        """Return the scored token chosen at a position of the sequence, counted from the start of the prompt."""
        return _scored(self._rows.pop(position), token, self._top)


@torch.no_grad()
def scored_prompt(model: PreTrainedModel, ids: torch.Tensor, top: int) -> list[ScoredToken]:
    """Return the scored tokens of a prompt (1, length), each conditioned on the tokens before it."""
    tokens, cache = [ScoredToken(int(ids[0, 0]))], None
    for start in range(0, ids.shape[1] - 1, _CHUNK):
        # The last token is left to the generation: no prompt token follows it.
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
    """Reads each token of one output once, as a streamer and, with stop strings, also as a stopping criterion. Our loop
    calls the criterion first; transformers' own loop calls the streamer first.
    """

    def __init__(
        self,
        output: Output,
        prompt_tokens: int,
        recorder: LogprobRecorder | None,
        on_deltas: Callable[[list[Delta]], None],
        check: Callable[[], None],
    ) -> None:
        """`on_deltas` is called after each step with one delta per token. `check` is called at every step and every
        chunk of a prompt, and raises to end the sequence.
        """
        self._output, self._recorder, self._on_deltas, self.reading_prompt = output, recorder, on_deltas, check
        self._read = self._streamed = prompt_tokens
        """Numbers of tokens of the sequence that were read, and that were passed to the streamer."""
        self._prompt_came = False
        self._deltas: list[Delta] = []
        """Deltas of tokens that were read but not passed to `on_deltas` yet."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return a (1,) bool tensor: whether a stop string ended the output."""
        self._push(input_ids[0, self._read :].tolist())
        return torch.tensor([self._output.stopped], device=input_ids.device)

    def put(self, value: torch.Tensor) -> None:
        """Read tokens from `generate`: first the prompt, then the tokens of each step."""
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
        """Do nothing; `generate` calls this after the last step."""

    def _push(self, tokens: list[int]) -> None:
        for token in tokens:
            scored = ScoredToken(token) if self._recorder is None else self._recorder.scored(self._read, token)
            self._read += 1
            self._deltas.append(self._output.push([scored]))
