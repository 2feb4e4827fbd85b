"""The chat template: Qwen's, with each assistant turn marked as generated."""

# `{% generation %}` marks what the assistant wrote, its end token included. Newlines are written
# as strings because Jinja, as transformers sets it up, drops the one after a block tag.
CHAT_TEMPLATE = """\
{%- macro render(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- render(message['content']) + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- render(message['content']) + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
