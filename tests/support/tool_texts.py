"""What the tests of tool calls share: tools, and for each format a chat template that writes calls
as models of that format do."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"enum": ["C", "F"]},
                "more": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city", "days"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}

_START = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content %}{{ m.content }}{% endif %}"
)
_END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_CALL, _CALL_END = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)
_CALLS = _CALL.replace("call\u2581", "calls\u2581")
_CALLS_END = _CALL_END.replace("call\u2581", "calls\u2581")
_SEP = "<\uff5ctool\u2581sep\uff5c>"

TEMPLATES = {
    "hermes": _START
    + "{% for c in m.tool_calls or [] %}{{ '' if loop.first else '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}" + _END,
    "qwen_xml": _START
    + "{% for c in m.tool_calls or [] %}{{ '' if loop.first else '\n' }}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}" + _END,
    "glm": _START
    + "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}" + _END,
    "deepseek_v3": _START
    + f"{{% if m.content is none %}}{_CALLS}{{% for c in m.tool_calls %}}"
    f"{{{{ '' if loop.first else '\n' }}}}{_CALL}function{_SEP}{{{{ c.function.name }}}}\n"
    f"```json\n{{{{ c.function.arguments }}}}\n```{_CALL_END}{{% endfor %}}{_CALLS_END}"
    "{% endif %}" + _END,
    "deepseek_v31": _START
    + f"{{% if m.content is none %}}{_CALLS}{{% for c in m.tool_calls %}}{_CALL}"
    f"{{{{ c.function.name }}}}{_SEP}{{{{ c.function.arguments }}}}{_CALL_END}{{% endfor %}}"
    f"{_CALLS_END}{{% endif %}}" + _END,
    "llama3_json": "{# Environment: ipython #}" + _START
    + "{% for c in m.tool_calls or [] %}{{ '' if loop.first else '; ' }}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}" + _END,
}  # fmt: skip


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    environment = Environment(trim_blocks=False, keep_trailing_newline=True)
    environment.policies["json.dumps_function"] = lambda value, **_: json.dumps(
        value, ensure_ascii=False
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(messages=messages, **options)


def earlier(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """An assistant's message with these calls, as clients send it back."""
    return {
        "role": "assistant", "content": "",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function",
             "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }  # fmt: skip
