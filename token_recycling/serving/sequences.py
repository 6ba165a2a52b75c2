"""From the body of a request to the sequences that are generated for it: limits, hints, grammar, and the arguments of
`generate`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LogitsProcessor

from ..loop.hints import Hints
from .errors import ApiError, invalid
from .job import Job, TokenSequence
from .logprobs import LogprobRecorder
from .protocol import Form, Request
from .sampling import config_of, processors_of
from .service import Service


async def sequences_of(
    service: Service,
    job: Job,
    ids: torch.Tensor,
    body: Request,
    default_tokens: int | None = None,
    top: int | None = None,
    calls: tuple[str, Form] | None = None,
) -> tuple[list[TokenSequence], GenerationConfig]:
    """Return the sequences that continue a prompt (1, length), one for each choice, and their configuration; raise
    ApiError. `default_tokens`: maximum output tokens where the body has none, None for the context; `top`: number of
    most likely tokens to score; `calls`: the field that constrains an output with tools, and its grammar.
    """
    config = config_of(body, service.loaded.model, default_tokens)
    length = ids.shape[-1]
    _limit(service, job, length, config, "prompt" if getattr(body, "messages", None) is None else "messages")
    hints = await asyncio.to_thread(_hints, service, job, body)
    new_grammar = await _grammar(service, job, body, config, calls)
    ids = ids.to(service.target.device)
    sequences = []
    for choice in range(getattr(body, "n", None) or 1):
        own = copy.deepcopy(config)
        recorder = None if top is None else LogprobRecorder(top)
        arguments = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "generation_config": own,
            "logits_processor": processors_of(body, own, length, service.target.vocab_size, recorder, new_grammar),
            "tokenizer": service.loaded.tokenizer,
        }
        seed = None if body.seed is None else body.seed + choice
        sequences.append(TokenSequence(arguments, seed, recorder, hints=hints, first=not choice))
    return sequences, config


def _limit(service: Service, job: Job, length: int, config: GenerationConfig, field: str) -> None:
    """Count a prompt of that length, from that field of the request, and limit `config.max_new_tokens`; raise ApiError
    for a prompt that is too long, and where more tokens are asked for than fit.
    """
    job.prompt_tokens += length
    settings, context = service.settings, service.loaded.context
    if not length:
        raise ApiError(400, f"{field}: the prompt must have at least one token, got 0", "empty_prompt", field)
    output = 1 if config.max_new_tokens else 0
    limits = [None if job.warm_up else settings.max_prompt_tokens, None if context is None else context - output]
    longest = min((limit for limit in limits if limit is not None), default=length)
    if length > longest:
        # litellm and langchain recognize the error by these words of OpenAI and Anthropic.
        message = (
            f"{field}: prompt is too long: {length} tokens > {longest} maximum; shorten it. This model's maximum "
            f"context length is {context or longest} tokens, and the prompt may have {longest} of them."
        )
        raise ApiError(400, message, "context_length_exceeded", field)
    limits = [config.max_new_tokens, settings.max_new_tokens, None if context is None else context - length]
    config.max_new_tokens = min(limit for limit in limits if limit is not None)
    if (config.min_new_tokens or 0) > config.max_new_tokens:
        fits = f"{config.max_new_tokens}, the tokens that fit"
        raise invalid("min_tokens", f"must be <= {fits}, got {config.min_new_tokens}")


def _hints(service: Service, job: Job, body: Request) -> Hints:
    """Return the prefix cache, the prediction and the limits of drafting; raise ApiError for a prediction that the
    drafter does not draft from.
    """
    isolated = job.isolated or job.warm_up or body.cache_prompt is False
    prefixes = None if isolated else service.prefixes.of(job.key)
    nodes = None if body.speculation is None else body.speculation.nodes
    prediction = getattr(body, "prediction", None)
    if prediction is None or not _drafts(body):
        return Hints(prefixes, nodes=nodes)
    if not service.pool.base.traits.predictions:
        raise invalid(
            "prediction",
            f"the server's drafter, {service.pool.base.name}, does not draft from predictions; start the server with "
            "--drafter recycling, or omit prediction",
        )
    ids = service.loaded.tokenizer(prediction.text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    ids = ids[ids < service.target.vocab_size]
    job.predicted_tokens += len(ids) * (getattr(body, "n", None) or 1)
    return Hints(prefixes, ids.long(), nodes)


def _drafts(body: Request) -> bool:
    return body.speculation is None or body.speculation.enabled


async def _grammar(
    service: Service, job: Job, body: Request, config: GenerationConfig, calls: tuple[str, Form] | None
) -> Callable[[], LogitsProcessor] | None:
    """Return a function that makes the processor of the request's output format, or of its tool `calls`; None where it
    has neither. Raise ApiError.
    """
    if (constrained := calls or body.form) is None:
        return None
    field, form = constrained
    for name in ("min_tokens", "ignore_eos"):
        if getattr(body, name):
            why = f"cannot be combined with {field}: the output ends where its format ends; omit one of them"
            raise invalid(name, why)
    return await service.grammars.processor(field, form, job.key, lambda: job.cancelled, job.isolated)
