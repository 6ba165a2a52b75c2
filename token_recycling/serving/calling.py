"""What a request says of the functions that may be called: fields of a chat, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from .errors import invalid

_UNWRITABLE = frozenset('"\\') | {chr(code) for code in range(32)}
"""Characters that a name cannot have between the quotes of a call."""


class NamedTool(BaseModel, extra="forbid"):
    """The one tool that is to be called: `function` in a chat, `name` in responses."""

    type: Literal["function"]
    name: str | None = None
    function: dict[str, str] | None = None

    @property
    def wanted(self) -> str | None:
        """The name of the function."""
        return self.name or (self.function or {}).get("name")


def _functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises ApiError for tools that are no functions with a name and a schema."""
    for tool in tools:
        function = found if isinstance(found := tool.get("function"), dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name or _UNWRITABLE & set(name):
            raise invalid("tools", "expected functions with names, without quotes and line breaks, got others")
        if not isinstance(function.get("parameters") or {}, dict):
            raise invalid("tools", f"expected parameters as a JSON schema, an object, got others in {name}")
    return tools


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | NamedTool | None,
    Field(description="`auto`; `none`, which shows no tools; with the extra `grammar` also `required` or a function"),
]


class Calling(BaseModel):
    """The functions, and whether they are to be called."""

    tools: Annotated[list[dict[str, Any]], AfterValidator(_functions)] | None = Field(
        None, description="by the template where it shows them and the model's calls can be read, else in words"
    )
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(None, description="false, one call at most, needs the extra `grammar`")

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The functions that the model is told of; None for none."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def held(self) -> str | None:
        """The field by which the answer is held to calls; None where all is left to the model."""
        if self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool):
            return "tool_choice"
        tools = self.shown_tools
        if tools is None:
            return None
        if any(tool["function"].get("strict") for tool in tools):
            return "tools"
        return "parallel_tool_calls" if self.parallel_tool_calls is False else None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The functions that an answer which is held to calls may call; raises ApiError where there are none."""
        tools, choice = self.shown_tools, self.tool_choice
        if tools is None:
            raise invalid("tool_choice", "expected tools to choose from, got none")
        if not isinstance(choice, NamedTool):
            return tools
        names = [tool["function"]["name"] for tool in tools]
        if choice.wanted not in names:
            raise invalid(
                "tool_choice", f"expected the name of one of the tools, {', '.join(names)}, got {choice.wanted!r}"
            )
        return [tools[names.index(choice.wanted)]]
