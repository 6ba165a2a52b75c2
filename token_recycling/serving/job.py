"""One request, from its arrival to its last token.

Each of its texts runs in a thread that generates. There torch is seeded and the model's own `generate` is called,
accelerated by the drafter that the isolation allows: alone, or together with the texts of other threads. It ends as
soon as its client disconnects or its time is over.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..costs.costs import Costs
from ..drafters._base import Drafter, DrafterTraits, TextDrafter
from ..hf.accelerate import accelerated
from ..hf.acceleration import Acceleration
from ..hf.batched import DecodingThread
from ..loop.stats import Stats
from ..model.tree_model import TreeModel
from ..trees.draft import Context, Draft, Step
from .errors import ApiError, CancelledError, client_error, server_error
from .logprobs import Scored
from .stopping import with_own_stopping
from .texts import Text, TokenStreamer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("token_recycling.serving")


@dataclass
class Job:
    """An accepted request. All but `cancel` and `generate_text` is for the thread of the event loop."""

    model: PreTrainedModel
    drafter: AbstractContextManager[Drafter]
    """Gives the drafter for the length of a `with` block, once."""
    key: str = ""
    """Name of its API key; empty where none is needed."""
    prefix: str = ""
    """What its id begins with."""
    timeout: float | None = None
    """Seconds from arrival to the last token at most."""
    together: DecodingThread | None = None
    """Decodes its texts together with others; None where one text is generated at a time."""
    texts: int = 1
    """How many will be generated, all with one drafter."""
    on_step: Callable[[Step, float], None] | None = None
    """Called in the thread that generates, with every step and the seconds since the prompt was read."""
    on_end: Callable[[Job], None] = lambda job: None
    """Called once, when nothing more will be generated."""
    warm_up: bool = False
    """The server's own request at start: its prompt may be longer than clients' may."""

    stats: Stats = field(default_factory=Stats, init=False)
    fallback: str | None = field(default=None, init=False)
    """Why transformers' own decoding was used, or None."""
    waited: float = field(default=0.0, init=False)
    """Seconds before its turn came."""
    started: bool = field(default=False, init=False)
    prompt_tokens: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self._since = time.monotonic()
        self._ended, self._failed, self._changing = False, False, threading.Lock()
        self._generating = self._begun = 0
        """Texts that are being generated, and all that have begun."""
        self._acquired: Drafter
        """Held from the first text to the last."""
        self._holding = ExitStack()
        self._interrupted: ApiError | None = None

    def cancel(self) -> None:
        """The client has disconnected: a running generation ends with its step, a waiting one never begins."""
        if not (self._ended or self._failed):
            self.cancelled = True
        if not self.started:
            self.end()

    def interrupt(self, error: ApiError) -> None:
        """The server ends the text, of which the client is told with that error."""
        self._interrupted = error

    def end(self) -> None:
        """Nothing more will be generated: calls `on_end`, the first time only."""
        with self._changing:
            first, self._ended = not self._ended, True
        if first:
            self.on_end(self)

    @property
    def outcome(self) -> str | None:
        """How it ended: complete, cancelled, failed; None if it was refused before its text began."""
        if self.cancelled:
            return "cancelled"
        if not self.started:
            return None
        return "failed" if self._failed else "complete"

    def check(self) -> None:
        """Raises CancelledError, also where another text has failed, or ApiError where the time is over or the server
        ends.
        """
        if self.cancelled or self._failed or self._ended:
            raise CancelledError
        if self._interrupted is not None:
            raise self._interrupted
        if self.timeout is None or time.monotonic() - self._since < self.timeout:
            return
        if not self.started:
            raise ApiError(503, f"the request waited for {self.timeout:g} s", "timeout", headers={"Retry-After": "5"})
        # Clients retry after a 504 unless a header forbids it.
        headers = {"x-should-retry": "false"}
        raise ApiError(504, f"the text was not complete within {self.timeout:g} s", "timeout", headers=headers)

    def generate_text(self, text: Text, tell: Callable[[list[Scored]], None]) -> None:
        """Generates a text, in a thread that generates; tells its tokens as they come, and none at its end."""
        with self._turn() as drafter:
            scores = text.prompt_scores(self.model)
            if scores:
                tell(scores)
            self._generate(drafter, text, tell)
            tell([])

    @contextmanager
    def _turn(self) -> Iterator[Drafter]:
        """The time in which a text is generated, with the drafter of all of them; with the last one the job ends. What
        fails in it is logged, and raised as an ApiError that does not say how.
        """
        try:
            self.check()
            with self._changing:
                if not self.started:
                    self.started, self.waited = True, time.monotonic() - self._since
                    self._acquired = self._holding.enter_context(self.drafter)
                self._begun, self._generating = self._begun + 1, self._generating + 1
            try:
                yield self._acquired if self.on_step is None else StepReporter(self._acquired, self.on_step)
            finally:
                with self._changing:
                    self._generating -= 1
        except CancelledError:
            raise
        except Exception as error:
            self._failed = True
            if isinstance(error, ApiError):
                raise
            logger.exception("the generation %s failed", self.id)
            raise server_error() from error
        finally:
            with self._changing:
                over = not self._generating and (self._begun == self.texts or self._failed or self.cancelled)
                if over:
                    self._holding.close()
            if over:
                self.end()

    def _generate(self, drafter: Drafter, text: Text, tell: Callable[[list[Scored]], None]) -> None:
        # None may predict another's draws.
        seed = secrets.randbits(63) if text.seed is None else text.seed
        arguments = {**with_own_stopping(text.arguments), "streamer": TokenStreamer(text, tell, self.check)}
        if self.together is None:
            torch.manual_seed(seed)
            model = self.model
            generating: AbstractContextManager[Acceleration] = accelerated(model, drafter)
        else:
            model = self.together.model(drafter, seed)
            generating = nullcontext(model.acceleration)
        with generating as acceleration:
            try:
                model.generate(**arguments)
            except (ValueError, TypeError) as error:
                if acceleration.reached:
                    raise
                raise client_error(error) from error  # transformers refuses what the configuration of the request says
            finally:
                with self._changing:
                    self.stats += acceleration.stats
                    self.fallback = acceleration.fallback


class StepReporter(Drafter):
    """Wraps a drafter: calls `on_step` with every step that it has learned from, and the seconds since the prompt was
    read.
    """

    def __init__(self, inner: Drafter, on_step: Callable[[Step, float], None]) -> None:
        self._inner, self._on_step = inner, on_step

    @property
    def traits(self) -> DrafterTraits:
        return self._inner.traits

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> TextDrafter:
        return _ReportedText(self, self._inner.start(prompt, target, costs), self._on_step)

    def describe(self) -> str:
        return self._inner.describe()


class _ReportedText(TextDrafter):
    """One text of a wrapped drafter; it has no `retrieval`, since a device that drafts by itself reports no steps."""

    def __init__(self, drafter: Drafter, inner: TextDrafter, on_step: Callable[[Step, float], None]) -> None:
        super().__init__(drafter)
        self._inner, self._on_step = inner, on_step
        self._since: float | None = None

    def observe_prompt(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        self._inner.observe_prompt(tokens, logits)

    def read_prompt(self, states: torch.Tensor) -> None:
        self._inner.read_prompt(states)

    def draft(self, context: Context) -> Draft:
        if self._since is None:
            self._since = time.perf_counter()
        return self._inner.draft(context)

    def observe(self, step: Step) -> None:
        self._inner.observe(step)
        assert self._since is not None
        self._on_step(step, time.perf_counter() - self._since)

    def statistics(self) -> Mapping[str, float]:
        return self._inner.statistics()

    def describe(self) -> str:
        return self._inner.describe()
