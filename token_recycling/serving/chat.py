"""`POST /v1/chat/completions`: from messages, through the template, to the texts that are generated."""

from __future__ import annotations

import asyncio
import re

from .answers import Asked, ChatForm
from .choices import Choice
from .errors import ApiError
from .job import Job
from .requests import ChatBody
from .response_templates import response_parser, response_template
from .service import Service
from .templates import rendered


async def asked(service: Service, body: ChatBody, job: Job) -> Asked:
    """The texts of a request; raises ApiError, and what the template raises."""
    tokenizer = service.loaded.tokenizer
    tools = None if body.tool_choice == "none" else body.tools or None
    if tools:
        check_tools(service)
    ids = await asyncio.to_thread(rendered, tokenizer, body.messages, tools=tools, **(body.chat_template_kwargs or {}))
    top = (body.top_logprobs or 0) if body.logprobs else None
    texts, config = await service.texts(job, ids, body, None, top)
    choices = [Choice(tokenizer, config, response_parser(service.loaded, ids, tools)) for _ in texts]
    return Asked(job, texts, choices, ChatForm(tokenizer, top), (), body.wants_usage)


def check_tools(service: Service) -> None:
    """Raises ApiError where tools would be lost, or calls of them could not be told from text."""
    template = service.loaded.tokenizer.get_chat_template(tools=[])
    missing = None
    if not re.search(r"\btools\b", template):
        missing = "the chat template of this model never shows them"
    elif "tool_calls" not in (response_template(service.loaded) or {"fields": {}})["fields"]:
        missing = "how this model writes its calls is not known (the tokenizer has no response template)"
    if missing is not None:
        raise ApiError(
            400, f"tools: expected a model that takes them, got one without: {missing}", "unsupported", "tools"
        )
