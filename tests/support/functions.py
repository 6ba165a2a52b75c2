"""Functions that a model may call, and an output with a call."""

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
FLAT = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
"""The same in the format of `/v1/responses`."""
PARAMETERS = {"type": "object", "properties": {"at": {"enum": [1, 2]}}, "required": ["at"]}
HELD = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "go")]
ASKED = [{"role": "user", "content": "a"}]
SAID = 'Let me see.<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
