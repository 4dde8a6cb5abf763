"""How each format writes calls, for tests: written beside the parsers, from what the models' templates show."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
Written = Sequence[tuple[str, Arguments]]
"""Calls: name and arguments."""


@dataclass(frozen=True)
class Writer:
    """`calls` writes some calls as a model does. `opening`: what begins them, behind which prose may stand in a broken answer.
    `can_follow_text`: calls may stand behind other text."""

    calls: Callable[[Written], str]
    opening: str
    can_follow_text: bool = True


def _json(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _hermes(calls: Written) -> str:
    return "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls)


def _dumped(arguments: Arguments) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _llama(calls: Written) -> str:
    return "<|python_tag|>" + "; ".join(_json(*call, key="parameters") for call in calls)


def _llama_bare(calls: Written) -> str:
    return "; ".join(_json(*call, key="parameters") for call in calls)


def _python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _pythonic(calls: Written) -> str:
    return f"[{', '.join(_python(*call) for call in calls)}]"


def _mistral_list(calls: Written) -> str:
    return f"[TOOL_CALLS][{', '.join(_json(*call) for call in calls)}]"


def _mistral(calls: Written) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dumped(arguments)}" for name, arguments in calls)


def _deepseek_v3(calls: Written) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dumped(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Written) -> str:
    each = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dumped(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen_coder(calls: Written) -> str:
    def one(name: str, arguments: Arguments) -> str:
        lines = (f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: Written) -> str:
    def one(name: str, arguments: Arguments) -> str:
        lines = (f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items())
        return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _kimi(calls: Written) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_dumped(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def _granite(calls: Written) -> str:
    return f"<|tool_call|>[{', '.join(_json(*call) for call in calls)}]"


def _granite_4(calls: Written) -> str:
    return _hermes(calls)


def _phi(calls: Written) -> str:
    return f"functools[{', '.join(_json(*call) for call in calls)}]"


def _phi_mini(calls: Written) -> str:
    return f"<|tool_call|>[{', '.join(_json(*call) for call in calls)}]<|/tool_call|>"


def _gemma_code(calls: Written) -> str:
    return "```tool_code\n" + "\n".join(_python(*call) for call in calls) + "\n```"


def _function_gemma(calls: Written) -> str:
    def text(value: Any) -> str:
        if isinstance(value, str):
            return f"<escape>{value}<escape>"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{text(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(text, value)) + "]"
        return json.dumps(value)

    each = (f"<start_function_call>call:{name}{text(arguments)}<end_function_call>" for name, arguments in calls)
    return "".join(each)


def _minimax(calls: Written) -> str:
    def one(name: str, arguments: Arguments) -> str:
        lines = (f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items())
        return f'<invoke name="{name}">\n{"".join(lines)}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def _harmony(calls: Written) -> str:
    each = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_dumped(arguments)}<|call|>"
        for name, arguments in calls
    )
    return "<|start|>assistant".join(each)


def _generic(calls: Written) -> str:
    return f"[{', '.join(_json(*call) for call in calls)}]"


def _generic_block(calls: Written) -> str:
    return f"```json\n{_generic(calls)}\n```"


WRITERS: Mapping[str, Sequence[Writer]] = {
    "hermes": [Writer(_hermes, "<tool_call>")],
    "llama": [Writer(_llama, "<|python_tag|>"), Writer(_llama_bare, "", can_follow_text=False)],
    "pythonic": [Writer(_pythonic, "", can_follow_text=False)],
    "mistral": [Writer(_mistral_list, "[TOOL_CALLS]"), Writer(_mistral, "[TOOL_CALLS]")],
    "deepseek": [Writer(_deepseek_v3, "<｜tool▁calls▁begin｜>"), Writer(_deepseek_v31, "<｜tool▁calls▁begin｜>")],
    "qwen_coder": [Writer(_qwen_coder, "<tool_call>"), Writer(_hermes, "<tool_call>")],
    "glm": [Writer(_glm, "<tool_call>")],
    "kimi": [Writer(_kimi, "<|tool_calls_section_begin|>")],
    "granite": [Writer(_granite, "<|tool_call|>"), Writer(_granite_4, "<tool_call>")],
    "phi": [Writer(_phi, "functools"), Writer(_phi_mini, "<|tool_call|>")],
    "gemma": [Writer(_gemma_code, "```tool_code"), Writer(_function_gemma, "<start_function_call>")],
    "minimax": [Writer(_minimax, "<minimax:tool_call>")],
    "harmony": [Writer(_harmony, "", can_follow_text=False)],
    "json": [Writer(_generic, "", can_follow_text=False), Writer(_generic_block, "", can_follow_text=False)],
}
