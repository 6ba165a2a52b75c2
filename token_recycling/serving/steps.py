"""`POST /v1/token_recycling/steps`: a text step by step, as it is generated, with the draft tree of each step.

The same API key, limits, isolation and cancellation as every other request. The body is JSON:

| field | meaning |
|---|---|
| `prompt` or `messages` | a text to continue, or a chat, for which the chat template is used |
| `drafter` | `accelerated` (default): the server's; `anew`: it with nothing learned; `plain`: none; one of `--offer` |
| `max_tokens`, `seed`, `stop`, and all that says how tokens are chosen | as in /v1/chat/completions |

The answer is a stream of server-sent events, each with a name and JSON:

    event: start   {"id", "model", "prompt_tokens"}
    event: step    {"index", "seconds", "tokens", "texts", "accepted", "path", "draft": {"parents", "tokens", "texts"}}
    event: end     {"text", "finish_reason", "usage"}
    event: error   {"error": {"message", "type", "param", "code"}}

`start` comes at once, while the request may still wait for its turn. `seconds` counts from the end of the prefill, so
that it is comparable between drafters. `tokens` are the ids that the step emitted and `texts` what each adds to the
text, nothing while a character is not complete: put together, with the `text` of `end`, they are the whole text. The
first `accepted` of them were drafted; the others, one as a rule, are the model's own. `draft` is the tree: of every
node the parent (-1 for the root, which is the newest token of the text before), the token and its text; `path` names
the accepted nodes, the root first. `usage` is that of /v1/completions. The last event is `end` or `error`. A client
that disconnects ends the generation. What is refused before the stream begins (401, 400, 413, 429, 503) is answered
with that status and the JSON of `error`. In Python, `step_events` is the same as an async iterator of (name, data).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ..trees.draft import Step
from .choices import Choice
from .errors import failure
from .job import Job
from .logprobs import Scored
from .requests import StepsBody
from .sampling import config_of
from .service import Service
from .templates import rendered
from .texts import Text
from .told import told
from .usage import usage


async def prepare(service: Service, body: StepsBody, job: Job) -> Text:
    """The text of a request; raises ApiError."""
    tokenizer = service.loaded.tokenizer
    if body.messages is not None:
        service.check_chat()
        ids = await asyncio.to_thread(rendered, tokenizer, body.messages)
    else:
        ids = (await asyncio.to_thread(tokenizer, body.prompt, return_tensors="pt"))["input_ids"]
    config = config_of(body, service.loaded.model)
    service.limit(job, ids.shape[-1], config)
    return Text(service.arguments(body, ids, config), body.seed)


async def step_events(service: Service, job: Job, asked: Text) -> AsyncGenerator[tuple[str, Any]]:
    """The events of a request; closing the iterator ends the generation."""

    def begin(tell: Callable[[dict[str, Any]], None]) -> asyncio.Future[Any]:
        job.on_step = lambda step, seconds: tell(_plain_numbers(step, seconds))
        return service.worker.async_submit(job.generate_text, asked, lambda tokens: None, key=job.key)

    tokenizer = service.loaded.tokenizer
    text, index = Choice(tokenizer, asked.arguments["generation_config"]), 0
    try:
        yield "start", {"id": job.id, "model": service.settings.name, "prompt_tokens": job.prompt_tokens}
        async with contextlib.aclosing(told(job, begin)) as steps:
            async for step in steps:
                step["texts"] = [text.push([Scored(token)]).text for token in step["tokens"]]
                draft = step["draft"]
                draft["texts"] = [tokenizer.decode([token]) for token in draft["tokens"]]
                yield "step", {"index": index, **step}
                index += 1
        if not job.cancelled:
            said = {"text": text.end().text, "finish_reason": text.finish_reason}
            yield "end", {**said, "usage": usage(job, text.tokens)}
    except Exception as error:
        yield "error", failure(error)
    finally:
        job.cancel()


async def server_sent(events: AsyncGenerator[tuple[str, Any]]) -> AsyncGenerator[str]:
    """Events as text: `event: NAME` and `data: JSON`."""
    async with contextlib.aclosing(events):
        async for name, data in events:
            yield f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def _plain_numbers(step: Step, seconds: float) -> dict[str, Any]:
    """The data of a step event, as plain values: the logits must not be kept alive."""
    tree = step.draft.tree
    return {
        "seconds": round(seconds, 6),
        "tokens": step.tokens,
        "accepted": len(step.accepted) - 1,
        "path": step.accepted,
        "draft": {"parents": list(tree.parents), "tokens": step.draft.tokens.tolist()},
    }
