"""Label selectors as the API writes them in a query: `pool=decode,model in (a,b),!x`. Pure."""

import re
from collections.abc import Callable, Mapping

Labels = Mapping[str, str]
_KEY = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,316}"
_VALUE = r"[A-Za-z0-9._-]{0,63}"
_SET = re.compile(rf"({_KEY})\s+(in|notin)\s+\(([^()]*)\)")
_EQUAL = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})")
_EXISTS = re.compile(rf"(!?)\s*({_KEY})")


def parse_selector(text: str) -> Callable[[Labels], bool]:
    """Whether labels are meant; an empty text means all. Raises ValueError for what is no selector."""
    terms = [_term(each.strip()) for each in re.split(r",(?![^()]*\))", text) if text.strip()]
    return lambda labels: all(term(labels) for term in terms)


def _term(text: str) -> Callable[[Labels], bool]:
    if match := _SET.fullmatch(text):
        key, way, values = match[1], match[2], {each.strip() for each in match[3].split(",")}
        return lambda labels: (labels.get(key) in values) == (way == "in")
    if match := _EQUAL.fullmatch(text):
        key, way, value = match[1], match[2], match[3]
        return lambda labels: (labels.get(key) == value) == (way != "!=")
    if match := _EXISTS.fullmatch(text):
        key, is_absent = match[2], bool(match[1])
        return lambda labels: (key in labels) != is_absent
    raise ValueError(f"labelSelector: {text[:100]!r} cannot be read; write it like pool=decode")
