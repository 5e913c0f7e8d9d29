"""Folders with a tokenizer and a chat template that shows tools; no model can be loaded from them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TOOLS_TEMPLATE = """\
{%- set question = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set question.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with"
        " function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within'
        ' <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments":'
        ' <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > question.last and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Chat template that writes conversations as the templates of the models Qwen3 do."""
PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def make(folder: Path, template: str = TOOLS_TEMPLATE, *, tags: bool = True) -> Path:
    """Write a folder.

    The tokenizer has the single bytes and the pair ``12``. So a sampled ``1`` and a sampled ``2`` become one other
    token when their text is encoded. With ``tags`` it also has a token for each tag of these models.
    """
    folder.mkdir(exist_ok=True)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate((*characters, "12"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    if tags:
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "pad_token": _SPECIAL[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return folder
