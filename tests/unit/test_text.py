"""scheduler_service.text: prompts to tokens and tokens to text, never half a character."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scheduler_service.text import ByteCodec, HuggingFaceCodec, TextError, load_codec

TEXT = "Grüße, 世界! 🙂🙃 ok"
TEMPLATE = (
    "{% for message in messages %}\n<|start|>{{ message['role'] }}: {{ message.content }}<|end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}{{ bos_token }}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer trained on a few words, so that most characters here are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|start|>", "<|end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the capital of the land", "ok ok"], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_text_comes_in_whole_characters(directory: Path, chunk: int) -> None:
    """However the tokens are cut, no piece has a replacement character and all pieces together are the text."""
    for codec in (ByteCodec(), HuggingFaceCodec(directory)):
        tokens = codec.encode(TEXT)
        decoder = codec.decoder()
        pieces = [decoder.push(tokens[start : start + chunk]) for start in range(0, len(tokens), chunk)]
        assert "�" not in "".join(pieces)
        assert "".join(pieces) + decoder.finish() == TEXT
        assert len(tokens) > len(TEXT)  # so some character was several tokens


def test_unfinished_character_is_held_back_and_shown_at_the_end(directory: Path) -> None:
    """Bytes that never become a character are U+FFFD, once the output is over and not before."""
    for codec in (ByteCodec(), HuggingFaceCodec(directory)):
        tokens = codec.encode("a世")[:-1]
        decoder = codec.decoder()
        assert decoder.push(tokens) == "a"
        assert decoder.finish() == "�"
        assert decoder.finish() == ""


def test_special_tokens_give_no_text(directory: Path) -> None:
    """A stop token at the end, or one in the middle, is not printed."""
    codec = HuggingFaceCodec(directory)
    end = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<|end|>")
    decoder = codec.decoder()
    assert decoder.push([*codec.encode("ok"), end, *codec.encode("世"), end]) + decoder.finish() == "ok世"
    assert ByteCodec().decoder().push([104, 257, 105, 256]) == "hi"


def test_blank_before_the_first_word_survives(tmp_path: Path) -> None:
    """A tokenizer that drops the blank at the start of a text keeps it in a continuation, since the prompt is its context."""
    tokenizer = Tokenizer(models.WordLevel({"▁of": 0, "▁France": 1, "▁is": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = HuggingFaceCodec(tmp_path)
    assert codec.decoder(codec.encode("of France")).push([2]) == " is"
    assert codec.decoder().push([2]) == "is"


def test_chat_template_is_rendered_as_models_expect(directory: Path, tmp_path: Path) -> None:
    """Line breaks after block tags are trimmed, special tokens are filled in, and chat_template.jinja goes first."""
    codec = HuggingFaceCodec(directory)
    rendered = "<|start|>user: hi<|end|>\n<|start|>assistant: <s>"
    assert codec.render_chat([{"role": "user", "content": "hi"}]) == rendered
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.decode(codec.encode_chat("hi"), skip_special_tokens=False) == rendered
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}")
    assert HuggingFaceCodec(tmp_path).render_chat([{"role": "user", "content": "ü<"}]) == '"ü<"'


def test_template_that_refuses_is_told(directory: Path, tmp_path: Path) -> None:
    """raise_exception in a template, and a template that reaches for internals, are errors with words, not tracebacks."""
    for name in ("tokenizer.json",):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    codec = HuggingFaceCodec(tmp_path)
    with pytest.raises(TextError, match="no chat template"):
        codec.encode_chat("hi")
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no user here') }}")
    with pytest.raises(TextError, match="no user here"):
        codec.encode_chat("hi")
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(TextError, match="unsafe"):
        codec.encode_chat("hi")


def test_codec_follows_what_the_server_says(directory: Path, tmp_path: Path) -> None:
    """A path is loaded, a byte-level model needs none, and every dead end says which option helps."""
    assert isinstance(load_codec("m", "llama", str(directory)), HuggingFaceCodec)
    assert isinstance(load_codec("m", "llama", "/not/here", override=directory), HuggingFaceCodec)
    assert isinstance(load_codec("tiny", "LlamaForCausalLM", ""), ByteCodec)
    with pytest.raises(TextError, match="--tokenizer"):
        load_codec("m", "llama", str(tmp_path / "elsewhere"))
    with pytest.raises(TextError, match="--tokens"):
        load_codec("fingerprint", "fingerprint", "")
    with pytest.raises(TextError, match=r"no tokenizer\.json"):
        load_codec("m", "llama", "", override=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match="is no tokenizer"):
        load_codec("m", "llama", "", override=tmp_path)


def test_missing_package_names_the_extra(directory: Path) -> None:
    """Without `tokenizers` the module still imports, and loading a tokenizer says what to install."""
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from pathlib import Path\n"
        "from scheduler_service.text import HuggingFaceCodec, TextError\n"
        "try:\n"
        f"    HuggingFaceCodec(Path({str(directory)!r}))\n"
        "except TextError as error:\n"
        "    print(error)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "pip install 'pagemirror[text]'" in output
