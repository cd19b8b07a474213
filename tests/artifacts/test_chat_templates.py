"""Which roles a chat template writes: the same as transformers finds, for templates of published families."""

from pathlib import Path

import pytest

from nemotron_steps.artifacts.chat_templates import _CHATS, _TEXT, ROLES, chat_template, roles_written, writes_tools
from nemotron_steps.models.tokenizers import CHAT_TEMPLATE

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parents[1] / "models/chat_templates").glob("*")}
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{% endif %}
{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}"""
MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{% endgeneration %}{% continue %}
{% endif %}{{ m.role + m.content + strftime_now('%Y') }}{% endfor %}"""


def by_transformers(template: str) -> tuple[str, ...]:
    from transformers.utils.chat_template_utils import render_jinja_template

    written = []
    for role in ROLES:
        try:
            ((text,), _) = render_jinja_template([_CHATS[role]], chat_template=template, bos_token="", eos_token="")
        except Exception:
            continue
        if _TEXT in text:
            written.append(role)
    return tuple(written)


@pytest.mark.parametrize("template", [*TEMPLATES.values(), CHAT_TEMPLATE, GEMMA, MARKED], ids=[*TEMPLATES, *"tgm"])
def test_roles_are_those_that_transformers_finds(template: str) -> None:
    found = roles_written(template)
    assert writes_tools(template) is (template not in (GEMMA, MARKED))
    assert found == by_transformers(template)
    assert {"user", "assistant"} <= set(found)


def test_the_template_of_a_folder_is_the_file_or_that_of_the_settings(tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]}')
    assert chat_template(tmp_path) == "y"
    settings.write_text('{"chat_template": "z"}')
    assert chat_template(tmp_path) == "z"
    (tmp_path / "chat_template.jinja").write_text("w")
    assert chat_template(tmp_path) == "w"


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", ()),
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}", ROLES),
        ("{% if messages[0].role == 'user' %}\n  {% set x = messages[0].content %}\n{{ x }}{% endif %}", ("user",)),
    ],
)
def test_a_role_is_written_where_its_words_are(template: str, roles: tuple[str, ...]) -> None:
    assert roles_written(template) == roles
