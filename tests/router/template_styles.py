"""Chat templates in the ten common styles: what each family of models wants around a conversation.

Written for these tests, with the constructs that such templates use (macros, namespaces, loop controls,
whitespace control, slices, string methods, JSON), not copied from any model.
"""

from __future__ import annotations

CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set turns = messages %}{% set system = false %}{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant, user, assistant, ...') }}
{% endif %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] if loop.first and system
  else message['content'] %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""

LLAMA3 = """\
{{- bos_token }}
{%- set date = date_string if date_string is defined else '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}
    {{- 'Environment: ipython\\n' }}
{%- endif %}
{{- 'Today: ' + date + '\\n\\n' }}
{%- if tools is not none %}
    {{- 'Answer with a call of one of these functions.\\n\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('One tool call at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0, system='') %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content + '\\n\\n' %}
    {%- elif message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}{{- ', ' if not loop.last else ']' }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if message.content is string %}
            {{- '[INST] ' + ns.system + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' }}
            {%- for part in message.content %}
                {%- if part.type == 'text' %}{{- part.text }}{%- else %}{{- '[IMG]' }}{%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
        {%- set ns.system = '' %}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}
            {%- if call.id is defined and call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be strings of length 9!') }}
            {%- endif %}
            {{- ', "id": "' ~ call.id ~ '"}' ~ (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content ~ '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Unknown role ' + message.role) }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

QWEN = """\
{%- macro content_of(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}{%- if 'text' in item %}{{- item.text }}{%- endif %}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- content_of(messages[0].content) + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <name>, "arguments": <json>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + content_of(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and not (message.content is string
        and message.content.startswith('<tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = content_of(message.content) %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, system='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}"
    "{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
    "{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is none %}"
    "{{ 'never: nulls are dropped' }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is defined %}"
    "{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}"
    "{%- set ns.is_tool = false -%}"
    "{%- else %}{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- if not ns.is_tool %}{{ '<｜tool▁outputs▁begin｜>' }}{%- endif %}"
    "{%- set ns.is_tool = true -%}{{ '\\n<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}"
    "{%- endif %}{%- endfor -%}"
    "{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

COMMAND_R = """\
{{ bos_token }}{% for message in messages %}
{%- set role = {'user': 'USER', 'system': 'SYSTEM', 'assistant': 'CHATBOT'}[message.role] %}
{{- '<|START_OF_TURN_TOKEN|><|' ~ role ~ '_TOKEN|>' ~ message.content.strip() ~ '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if documents %}{{ '<results>\n' }}
{%- for document in documents %}{{ 'Document: ' }}{{ loop.index0 }}{{ '\n' }}
{%- for key, value in document.items() %}{{ key ~ ': ' ~ value ~ '\n' }}{% endfor %}{% endfor %}{{ '</results>' }}
{%- endif %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

COMMAND_R_TOOL_USE = """\
{%- macro type_of(schema) -%}
{%- if schema.type == 'array' -%}List[{{ type_of(schema['items']) if schema['items'] else 'Any' }}]
{%- elif schema.type in ('string', 'integer', 'number') -%}
{{ {'string': 'str', 'integer': 'int', 'number': 'float'}[schema.type] }}
{%- else -%}Dict{%- endif -%}
{%- endmacro -%}
{{ bos_token }}## Tools
{% for tool in tools %}{% set tool = tool.function or tool %}
```python
def {{ tool.name }}({% for name, schema in (tool.parameters.properties or {}).items() %}
{{- name }}: {{ type_of(schema) }}{% if name not in tool.parameters.required %} = None{% endif %}
{{- ', ' if not loop.last }}
{%- endfor %}) -> List[Dict]:
    \"\"\"{{ tool.description }}\"\"\"
    pass
```
{%- endfor %}
{% for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|CHATBOT_TOKEN|>Action: ```json\n' ~ (message.tool_calls | map(attribute='function') | list | tojson(indent=4)) }}
{{- '\n```' }}
{%- else %}{{ '<|' ~ message.role | upper ~ '_TOKEN|>' ~ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|CHATBOT_TOKEN|>' }}{% endif %}"""

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

STYLES: dict[str, dict[str, str]] = {
    "chatml": {"default": CHATML},
    "llama-2": {"default": LLAMA2},
    "llama-3": {"default": LLAMA3},
    "mistral": {"default": MISTRAL},
    "gemma": {"default": GEMMA},
    "phi": {"default": PHI},
    "qwen": {"default": QWEN},
    "deepseek": {"default": DEEPSEEK},
    "zephyr": {"default": ZEPHYR},
    "command-r": {"default": COMMAND_R, "tool_use": COMMAND_R_TOOL_USE},
    "smollm2": {"default": SMOLLM2},
}
"""Style → named templates."""
