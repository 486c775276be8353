"""Which tokens of a chat are learnt: what `transformers` says of the same template with its answers marked by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from nolocod.errors import BaseModelError, ChatTemplateError, RecordError
from nolocod.run.data import Data
from nolocod.trainer.chat_template import ChatTemplate, read_template, said_by_assistant
from nolocod.trainer.data import JsonTokenizer, make_tokenizer
from tests.support.base_model import publish
from tests.support.chat_templates import MARKED, SPECIAL, plain

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.trainer.records import Message

CHAT = Data(source="jsonl", kind="chat", tokenizer="base")


def chat(*said: str, system: str = "") -> list[Message]:
    """The user and the assistant in turn."""
    begin = [{"role": "system", "content": system}] if system else []
    return begin + [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(said)]


CHATS = {
    "one answer": chat("time and tide?", "wait for no node"),
    "several": chat("time", "and tide", "wait", "for no node", "number", "97"),
    "the same words": chat("ok", "ok", "ok", "ok"),
    "words of the template": chat("user", "assistant", "assistant", "user"),
    "spaces around": chat("  time ", " \n and tide\n ", "wait ", "  for no node  "),
    "accents and signs": chat("où êtes-vous? 🙂", "c'est ça — 🙃 tout près", "日本", "日本語です"),
    "thoughts": chat("time", "<think>\nhm\n</think>\n\nand tide", "wait", "<think>\nand\n</think>\n\nfor no node"),
    "ends with a question": chat("time", "and tide", "wait?"),
    "a long answer": chat("tide", "wait for no node\n\n" * 8 + "the end"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "model", special=SPECIAL)


def learnt(base: Path, source: str, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Ids, and 1 where they are learnt."""
    (base / "chat_template.jinja").write_text(source)
    tokenizer = make_tokenizer(CHAT, base)
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer.template is not None
    tokenizer.template.check()
    text, spans = tokenizer.template.render(messages)
    ids, offsets = tokenizer.encode_where(text)
    return ids.tolist(), said_by_assistant(offsets, spans).astype(int).tolist()


@pytest.mark.parametrize("which", CHATS)
@pytest.mark.parametrize("name", MARKED)
def test_the_answers_are_learnt_token_by_token(base: Path, name: str, which: str) -> None:
    own = AutoTokenizer.from_pretrained(base)
    given = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    told = own.apply_chat_template(CHATS[which], chat_template=MARKED[name], **given)
    assert 0 < sum(told["assistant_masks"]) < len(told["input_ids"])
    for source in (plain(name), MARKED[name]):
        assert learnt(base, source, CHATS[which]) == (told["input_ids"], told["assistant_masks"])
    assert own.apply_chat_template(CHATS[which], chat_template=plain(name), **given)["input_ids"] == told["input_ids"]


def test_a_tokenizer_that_cuts_what_it_encodes_does_not_cut_chats(base: Path, tmp_path: Path) -> None:
    whole = learnt(base, plain("chatml"), CHATS["a long answer"])
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    about = json.loads((base / "tokenizer.json").read_text())
    about |= {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    assert learnt(tmp_path, plain("chatml"), CHATS["a long answer"]) == whole


def test_a_system_s_words_are_not_learnt(base: Path) -> None:
    ids, mask = learnt(base, plain("chatml"), chat("time", "and tide", system="wait for no node"))
    tokenizer = make_tokenizer(CHAT, base)
    assert tokenizer.decode([one for one, counts in zip(ids, mask, strict=True) if counts]) == "and tide<|im_end|>"


def test_thoughts_are_left_out_where_the_template_leaves_them_out(base: Path) -> None:
    ids, mask = learnt(base, plain("thinks"), chat("time", "and tide", "wait", "for no node"))
    found = make_tokenizer(CHAT, base).decode([one for one, counts in zip(ids, mask, strict=True) if counts])
    assert found == "and tide<|im_end|><think>\n\n</think>\n\nfor no node<|im_end|>"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for message in messages %}{{ message.content }", "no valid jinja (line 1"),
        ("{{ raise_exception('only tools') }}", "refuses it: only tools"),
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses it: access to attribute"),
        ("{{ 1 // 0 }}", "refuses it: "),
        ("{{ messages | length }}", "in which its answer is not found"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not let one tell the assistant's answers"),
        ("{% for m in messages | reverse %}{{ m.role + m.content + ';' }}{% endfor %}", "in which its answer is not found"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "does not let one tell"),
    ],
)
def test_a_template_that_does_not_serve_is_refused_before_anything_is_trained(source: str, says: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source, {}).check()
    assert says in caught.value.cause


def test_a_template_gets_no_further_than_its_sandbox(tmp_path: Path) -> None:
    """It is a stranger's: it neither reads files, nor calls what Python has, nor changes what it is given."""
    for source in ("{% include '/etc/passwd' %}", "{{ ''.__class__.__base__.__subclasses__() }}", "{{ messages.append(1) }}"):
        with pytest.raises(ChatTemplateError, match="refuses it"):
            ChatTemplate(source, {}).check()


def test_roles_that_the_template_refuses_are_told() -> None:
    template = ChatTemplate(plain("trims"), {"bos_token": "<s>", "eos_token": "</s>"})
    template.check()
    with pytest.raises(RecordError, match="refuses it: Roles must alternate!"):
        template.render(chat("time", "tide", system="wait"))


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    (config := tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "pad_token": None}))
    assert read_template(tmp_path) is None
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    config.write_text(json.dumps({"chat_template": several, "bos_token": {"content": "<s>"}, "add_bos_token": True}))
    assert read_template(tmp_path) == ChatTemplate("plain", {"bos_token": "<s>"})
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert read_template(tmp_path) == ChatTemplate("own file", {"bos_token": "<s>"})
    config.write_text("[")
    with pytest.raises(BaseModelError, match="chat template cannot be read"):
        read_template(tmp_path)
