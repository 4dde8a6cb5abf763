"""Chat templates as Hugging Face renders them."""

from __future__ import annotations

from datetime import datetime

import pytest

from pdmesh.text.chat_template import ChatTemplate, Message, select_template

HELLO = [Message("user", "Hello")]


def render(source: str, messages: list[Message] = HELLO, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(messages)


def test_blocks_are_trimmed_and_special_tokens_are_there() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message['role'] == 'user' %}\n"
        "[{{ message.content }}]{{ eos_token }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}\n<assistant>{% endif %}"
    )
    assert render(source, bos_token="<s>", eos_token="</s>") == "<s>[Hello]</s>\n<assistant>"


def test_loop_controls() -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}"
    assert render(source, [Message("system", "a"), Message("user", "b"), Message("user", "c")]) == "b"


def test_generation_tags_are_transparent() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}"
    assert render(source) == "Hello!"


def test_tojson_leaves_characters_alone() -> None:
    assert render("{{ messages | tojson }}", [Message("user", "<é>")]) == '[{"role": "user", "content": "<é>"}]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_strftime_now() -> None:
    before = datetime.now().strftime("%Y")
    assert render("{{ strftime_now('%Y') }}") in (before, datetime.now().strftime("%Y"))


def test_tools_and_documents_are_none() -> None:
    assert render("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}") == "TrueTrueTrue"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{% for %}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_refusals_name_the_messages(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"messages: .*({said})"):
        render(source)


def test_no_messages() -> None:
    with pytest.raises(ValueError, match="at least one"):
        render("x", [])


def test_content_is_not_a_template() -> None:
    assert render("{{ messages[0].content }}", [Message("user", "{{ 7 * 7 }}")]) == "{{ 7 * 7 }}"


def test_select_template() -> None:
    assert select_template(None) == (None, ())
    assert select_template("a") == ("a", ())
    assert select_template([{"name": "tool_use", "template": "a"}]) == ("a", ())
    assert select_template([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]) == ("b", ())
    several = [{"name": "tool_use", "template": "a"}, {"name": "rag", "template": "b"}]
    assert select_template(several) == (None, ("rag", "tool_use"))
    for wrong in ([{"name": "x"}], [1], {"default": 1}, 7):
        with pytest.raises(ValueError, match="chat_template is neither a text nor a list"):
            select_template(wrong)
