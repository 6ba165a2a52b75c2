"""One accepted request, from its arrival to its last token.

Each of its sequences is generated in a worker thread (`decoder`), with the drafter that the isolation allows. A request
ends as soon as its client disconnects or its timeout expires.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..drafters._base import PREDICTED, Drafter
from ..hf.acceleration import ANOTHER_LOOP
from ..loop.hints import NO_HINTS, Hints
from ..loop.stats import Stats
from .decoder import Decoder
from .errors import ApiError, CancelledError, client_error, config_error
from .logprobs import LogprobRecorder, ScoredToken, scored_prompt
from .stopping import with_own_stopping

logger = logging.getLogger("token_recycling.serving")

OnTokens = Callable[[list[ScoredToken]], None]


@dataclass
class TokenSequence:
    """One sequence to generate."""

    arguments: dict[str, Any]
    """Arguments of `generate`."""
    seed: int | None = None
    recorder: LogprobRecorder | None = None
    """One of its logits processors, where log-probabilities are requested."""
    scored_prompt: int | None = None
    """Number of most likely tokens to score for every prompt token; None: the prompt is not scored."""
    hints: Hints = NO_HINTS
    """Prefix cache, prediction and limits of drafting."""
    first: bool = True
    """Whether it is the first choice of its prompt: cached prompt tokens count once."""


@dataclass
class Job:
    """An accepted request. Everything but `cancel` and `generate` runs in the thread of the event loop."""

    decoder: Decoder
    drafter: Callable[[], Drafter] | None = None
    """Returns the drafter; called once, when the first sequence begins. None until the job is admitted."""
    key: str = ""
    """Name of its API key; empty without API keys."""
    prefix: str = ""
    """Prefix of its id."""
    timeout: float | None = None
    """Maximum seconds from arrival to the last token."""
    sequences: int = 1
    """Number of sequences, all with one drafter."""
    wrap_drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter
    """Wraps the drafter to observe its steps."""
    on_end: Callable[[Job], None] = lambda job: None
    """Called once, after the last token or a cancellation."""
    isolated: bool = False
    """It shares no drafter and no cache with other requests."""
    warm_up: bool = False
    """The server's own request at start: its prompt may be longer than clients' may."""

    stats: Stats = field(default_factory=Stats, init=False)
    fallback: str | None = field(default=None, init=False)
    """Reason for the fallback to transformers' own decoding, or None."""
    waited: float = field(default=0.0, init=False)
    """Seconds in the queue."""
    first_token_seconds: float | None = field(default=None, init=False)
    """From its arrival to the first generated token of any of its sequences."""
    started: bool = field(default=False, init=False)
    prompt_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the prefix cache."""
    predicted_tokens: int = field(default=0, init=False)
    """Tokens of its predictions, one prediction per sequence."""
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self._since = time.monotonic()
        self._ended, self._failed, self._lock = False, False, threading.Lock()
        self._running = self._begun = 0
        """Sequences in progress, and all that were started."""
        self._acquired: Drafter
        """Acquired with the first sequence."""
        self._interrupted: ApiError | None = None

    def cancel(self) -> None:
        """Cancel after a disconnect: a running generation ends with its step, a queued one never starts."""
        if not (self._ended or self._failed):
            self.cancelled = True
        if not self.started:
            self.end()

    def interrupt(self, error: ApiError) -> None:
        """End the generation with an error that the client receives."""
        self._interrupted = error

    def end(self) -> None:
        """Call `on_end`, the first time only."""
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            self.on_end(self)

    @property
    def seconds(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self._since

    @property
    def outcome(self) -> str | None:
        """complete, cancelled or failed; None if it was refused before generation started."""
        if self.cancelled:
            return "cancelled"
        if not self.started:
            return None
        return "failed" if self._failed else "complete"

    def usage(self, tokens: int) -> dict[str, Any]:
        """Return the usage block of a response with that many output tokens, drafting statistics included."""
        stats, accepted = self.stats, int(self.stats.drafter_statistics[PREDICTED])
        speculation = {
            "drafter": stats.drafter,
            "accelerated": self.fallback is None,
            "steps": stats.steps,
            "mat": round(stats.mat, 4),
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted.total(),
            "tokens_per_second": round(stats.tokens_per_second, 2),
            "wait_seconds": round(self.waited, 6),
            "prefill_seconds": round(stats.prefill_seconds, 6),
            "decode_seconds": round(stats.decode_seconds, 6),
            **({} if self.fallback is None else {"not_accelerated_because": self.fallback}),
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self.predicted_tokens - accepted,
            },
            "speculation": speculation,
        }

    def check(self) -> None:
        """Raise CancelledError, also where another sequence failed, or ApiError after the timeout or at shutdown."""
        if self.cancelled or self._failed or self._ended:
            raise CancelledError
        if self._interrupted is not None:
            raise self._interrupted
        if self.timeout is None or self.seconds < self.timeout:
            return
        if not self.started:
            raise ApiError(
                503,
                f"the request was queued for {self.timeout:g} s, its timeout; try again later",
                "timeout",
                headers={"Retry-After": "5"},
            )
        # Clients retry after a 504 unless a header forbids it.
        headers = {"x-should-retry": "false"}
        raise ApiError(
            504, f"the output was not complete within {self.timeout:g} s, the timeout", "timeout", headers=headers
        )

    def generate(self, sequence: TokenSequence, on_tokens: OnTokens) -> None:
        """Generate a sequence in a worker thread; call `on_tokens` with the tokens of each step, with none at its end.
        The job ends with its last sequence. A failure is logged, and raised as an ApiError without details.
        """
        try:
            self.check()
            self._begin()
            try:
                if sequence.scored_prompt is not None:
                    ids = sequence.arguments["input_ids"]
                    on_tokens(scored_prompt(self.decoder.model, ids, sequence.scored_prompt))
                if sequence.arguments["generation_config"].max_new_tokens != 0:
                    self._decode(self.wrap_drafter(self._acquired), sequence, on_tokens)
                on_tokens([])
            finally:
                with self._lock:
                    self._running -= 1
        except CancelledError:
            raise
        except Exception as error:
            self._failed = True
            raise client_error(error, f"generation {self.id}") from error
        finally:
            with self._lock:
                over = not self._running and (self._begun == self.sequences or self._failed or self.cancelled)
            if over:
                self.end()

    def _begin(self) -> None:
        """Count a sequence, the first of which acquires the drafter."""
        with self._lock:
            if not self.started:
                self.started, self.waited = True, self.seconds
                assert self.drafter is not None
                self._acquired = self.drafter()
            self._begun, self._running = self._begun + 1, self._running + 1

    def _decode(self, drafter: Drafter, sequence: TokenSequence, on_tokens: OnTokens) -> None:
        # No client may predict the samples of another.
        seed = secrets.randbits(63) if sequence.seed is None else sequence.seed

        def on_step(tokens: list[ScoredToken]) -> None:
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds
            on_tokens(tokens)

        streamer = TokenStreamer(sequence.recorder, on_step, self.check)
        model = self.decoder.accelerated(drafter, seed, sequence.hints)
        acceleration = model.acceleration
        try:
            model.generate(**with_own_stopping(sequence.arguments), streamer=streamer)
            if not acceleration.reached:
                acceleration.fallback = ANOTHER_LOOP
        except (ValueError, TypeError) as error:
            # Before the first forward pass, transformers checks the generation configuration of the request.
            raise error if acceleration.reached else config_error(error) from error
        finally:
            with self._lock:
                self.stats += acceleration.stats
                self.cached_tokens += acceleration.stats.cached_tokens if sequence.first else 0
                self.fallback = acceleration.fallback


class TokenStreamer:
    """A streamer of `generate` that passes on the tokens of every step, scored where there is a recorder. `check` is
    called with every step and every chunk of a prompt, and raises to end the sequence.
    """

    def __init__(self, recorder: LogprobRecorder | None, on_tokens: OnTokens, check: Callable[[], None]) -> None:
        self._recorder, self._on_tokens, self.reading_prompt = recorder, on_tokens, check
        self._position: int | None = None

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: with the prompt first, then with the tokens of each step."""
        self.reading_prompt()
        start, tokens = self._position, value.flatten().tolist()
        self._position = (start or 0) + len(tokens)
        if start is None:
            return
        recorder = self._recorder
        if recorder is None:
            self._on_tokens([ScoredToken(token) for token in tokens])
        else:
            self._on_tokens([recorder.scored(start + place, token) for place, token in enumerate(tokens)])

    def end(self) -> None:
        """Called after the last step; there is nothing to do."""
