"""`POST /v1/completions`: from a body to the texts that are generated."""

from __future__ import annotations

import asyncio

import torch

from .answers import Asked, Form
from .choices import Choice
from .errors import ApiError
from .job import Job
from .requests import TextBody
from .service import Service
from .texts import Text

_DEFAULT_TOKENS = 16
"""As in OpenAI's API."""


async def asked(service: Service, body: TextBody, job: Job) -> Asked:
    """The texts of a request; raises ApiError."""
    tokenizer = service.loaded.tokenizer
    texts: list[Text] = []
    choices: list[Choice] = []
    echoes: list[str] = []
    for prompt in body.prompts:
        ids = await asyncio.to_thread(_ids, service, prompt)
        made, config = await service.texts(job, ids, body, _DEFAULT_TOKENS, body.logprobs)
        for text in made:
            text.scored_prompt = body.logprobs if body.echo else None
            choices.append(Choice(tokenizer, config))
        texts += made
        if body.echo:
            shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
            echoes += [shown] * len(made)
    return Asked(job, texts, choices, Form(tokenizer, body.logprobs), echoes, body.wants_usage)


def _ids(service: Service, prompt: str | list[int]) -> torch.Tensor:
    if isinstance(prompt, str):
        return service.loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
    if max(prompt) >= service.target.embedded:
        message = f"prompt: expected token ids below {service.target.embedded}, got {max(prompt)}"
        raise ApiError(400, message, "invalid_value", "prompt")
    return torch.tensor([prompt])
