"""Functions that a model may call, and how it calls one."""

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
FLAT = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
"""The same, as `/v1/responses` is given it."""
PARAMETERS = {"type": "object", "properties": {"at": {"enum": [1, 2]}}, "required": ["at"]}
HELD = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "go")]
ASKED = [{"role": "user", "content": "a"}]
SAID = 'Let me see.<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
