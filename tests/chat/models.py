"""Tiny tokenizers with chat templates of the common kinds, as directories that `PromptEncoder` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "Hello there, how are you today? I am well, thank you very much.",
    "The quick brown fox jumps over the lazy dog.\n\nThen it sleeps.\n",
    "user\nassistant\nsystem\nYou are a helpful assistant named Tiny.",
    "naïve café Übergröße 日本語 한국어 👩‍👩‍👧‍👦 🇩🇪",
    "    indented code = [1, 2, 3]\n\tprint('x')\n",
]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant named Tiny.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% else %}"
    "{% if message['role'] == 'user' %}"
    "{% if loop.first or (messages[0]['role'] == 'system' and loop.index0 == 1) %}{% endif %}"
    "{% if loop.last and messages[0]['role'] == 'system' %}"
    "{{ '[INST]' + messages[0]['content'] + '\n\n' + message['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST]' + message['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endif %}{% endfor %}"
)

QWEN3 = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{% set content = message.content %}"
    "{% if '</think>' in content and not loop.last %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

BYTE_LEVEL = {
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_start|>", "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ),
    "qwen3": (QWEN3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, "<|im_end|>"),
    "phi3": (PHI3, ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], None, "<|endoftext|>"),
    "none": (None, ["<|endoftext|>"], None, "<|endoftext|>"),
}
SENTENCEPIECE = {
    "llama2": (LLAMA2, ["<unk>", "<s>", "</s>"], "<s>", "</s>"),
    "gemma": (GEMMA, ["<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>"),
    "mistral": (MISTRAL, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], "<s>", "</s>"),
}
KINDS = [*BYTE_LEVEL, *SENTENCEPIECE]


def make_model_dir(path: Path, kind: str = "chatml", *, vocab_size: int = 420) -> Path:
    """Write the tokenizer files of a model of this kind."""
    if kind in BYTE_LEVEL:
        template, special, bos, eos = BYTE_LEVEL[kind]
        tokenizer = _byte_level(special, vocab_size)
    else:
        template, special, bos, eos = SENTENCEPIECE[kind]
        tokenizer = _sentencepiece(special, vocab_size, legacy=kind == "llama2")
    if kind == "qwen3":
        tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    if bos is not None:
        config["bos_token"] = bos
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _byte_level(special: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in special],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece(special: list[str], vocab_size: int, *, legacy: bool) -> Tokenizer:
    """BPE over characters with byte fallback, as converted SentencePiece models are."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if legacy else [])
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[
            *(AddedToken(text, normalized=False, special=True) for text in special),
            *(f"<0x{byte:02X}>" for byte in range(256)),
        ],
    )
    # No piece of theirs reaches over a word's end.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator([line.replace("日本語 한국어", "") for line in CORPUS], trainer)
    # Byte pieces are part of the vocabulary, not tokens that are looked for in a text.
    spec = json.loads(tokenizer.to_str())
    spec["pre_tokenizer"] = None
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(spec))
