"""Writes cases.json: templates with what Jinja2, configured as transformers does, makes of them.

    python3 -m venv venv && venv/bin/pip install jinja2==3.1.6
    venv/bin/python reference.py [SEED [RANDOM [FILE]]]     default: 1, 400, cases.json

Each case is a template, its messages and a text; text null means that Jinja2 raises an error. The first cases are
written by hand; the others are random expressions and statements of the supported part of the language. Then come the
templates of families/, written in the manner of well-known models, with the same conversations each. Tests run this
script, too, where they have a Python with Jinja2.
"""
import json
import random
import sys
import warnings
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


class Generation(jinja2.ext.Extension):
    """The statement that transformers adds; it prints its body."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("text"), [], [], body).set_lineno(line)

    def text(self, caller):
        return caller()


ENV = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
ENV.filters["tojson"] = tojson
ENV.filters["indent"] = lambda s, *args, **named: jinja2.filters.do_indent(s if isinstance(s, str) else None, *args, **named)  # it would append to a list
ENV.globals["raise_exception"] = raise_exception

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello,\n\"wörld\"!\t"},
        {"role": "assistant", "content": "<think>hm</think>\n\nHi 😀"}, {"role": "user", "content": "a,b,,c"}]

LINES = r"""
{{ messages[0].content }}|{{ messages[-1]['content'] }}|{{ messages[9] }}|{{ messages[0].none }}|
{{ messages[0]['role'] == 'system' and 'yes' or 'no' }}
{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }};{% endfor %}
{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined else '-' }}{{ loop.nextitem.role if not loop.last }};{% endfor %}
{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ m.content }}{% else %}none{% endfor %}
{% for m in messages if m.role == 'tool' %}x{% else %}none{% endfor %}
{% for m in [] %}x{% else %}empty{% endfor %}
{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}
{% for k, v in messages[0] | items %}{{ k }}={{ v }};{% endfor %}
{% for k in messages[0] %}{{ k }};{% endfor %}{{ messages[0].keys() | list | join('+') }}{{ messages[0].values() | join('+') }}
{% for c in messages[2].content %}{{ c }}.{% endfor %}
{% for i in range(3) %}{% for j in range(i) %}{{ i }}{{ j }} {% endfor %}{{ loop.index }}{% endfor %}
{% for i in range(10, 0, -3) %}{{ i }},{% endfor %}{{ range(3) | length }}
{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% set x = 1 %}{% for i in range(3) %}{{ x }}{% set x = x + i %}{{ x }},{% endfor %}{{ x }}
{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.role == 'user' %}{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.found }}{{ ns.n }}
{% set a, b = 1, 'two' %}{{ a }}{{ b }}{% set (a, b) = (b, a) %}{{ a }}{{ b }}
{% set x %}  text {{ messages[0].role }} {% endset %}[{{ x }}]{{ x | trim | length }}
{% if x is not defined %}u{% endif %}{% if x %}t{% elif y %}y{% elif not z %}z{% else %}e{% endif %}{{ x }}{{ x ~ 'a' }}
{% set x = none %}{{ x }}{{ x is none }}{{ x is defined }}{{ x == none }}{{ none.foo is defined }}{{ tools is none }}{{ not tools }}
{{ 1 + 2 * 3 - 4 // 3 % 2 }}{{ -7 // 2 }}{{ -7 % 3 }}{{ 7 % -3 }}{{ 7 // -2 }}{{ -3 + 1 }}{{ 2 - -2 }}{{ +5 }}{{ 'a' * 3 }}{{ 'a' * -1 }}
{{ 1 ~ 2 + 3 }}{{ 1 ~ 'x' ~ true ~ none ~ messages[0].role }}
{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 'a' < 'b' }}{{ 'a' <= 'a' }}{{ 2 > 1 > 0 }}{{ 1 == true }}{{ 0 == false }}{{ 1 != 2 }}{{ 'é' > 'z' }}
{{ 'a' in 'cat' }}{{ 'x' not in 'cat' }}{{ 'role' in messages[0] }}{{ 'tool_calls' in messages[0] }}{{ 2 in [1, 2] }}{{ 'b' in ('a', 'b') }}{{ 'a' in undef }}
{{ not 1 == 2 }}{{ not true and false }}{{ true or false and false }}{{ (true or false) and false }}{{ 0 or '' or 'x' }}{{ 1 and 2 }}{{ [] or 'e' }}
{{ 'a' if true }}{{ 'a' if false }}|{{ 'a' if false else 'b' if false else 'c' }}{{ ('a' if messages else 'b') ~ 'z' }}
{{ [1, 2, 3][1] }}{{ [1, 2, 3][-1] }}{{ [1, 2, 3][5] }}{{ 'héllo'[1] }}{{ 'héllo'[-1] }}{{ 'héllo'[9] }}{{ {'a': 1}['a'] }}{{ {'a': {'b': 2}}.a.b }}
{{ 'héllo'[1:3] }}{{ 'héllo'[:-1] }}{{ 'héllo'[::-1] }}{{ 'héllo'[::2] }}{{ 'héllo'[3:1] }}{{ 'héllo'[-2:] }}{{ 'héllo'[10:] }}{{ 'héllo'[-1:0:-2] }}{{ 'héllo'[:-10:-1] }}
{% for m in messages[1:] %}{{ m.role }},{% endfor %}{% for m in messages[::-1] %}{{ m.role }},{% endfor %}{% for m in messages[-2:] %}{{ m.role }},{% endfor %}{{ messages[:0] | length }}{{ messages[1:3][0].role }}
{{ messages[1].content | trim }}|{{ messages[1].content.strip() }}|{{ messages[1].content.lstrip() }}|{{ messages[1].content.rstrip() }}|{{ 'xxaxx'.strip('x') }}{{ 'abcba' | trim('ab') }}{{ '\x1c a \x85'.strip() }}
{{ 'a,b,,c'.split(',') | join('|') }}{{ ' a  b c '.split() | join('|') }}{{ ' a  b c '.split(none, 1) | join('|') }}{{ 'a,b,c'.split(',', 1) | join('|') }}{{ 'a b'.split(sep=' ', maxsplit=0) | join('|') }}{{ ''.split() | length }}{{ ''.split(',') | length }}
{{ messages[2].content.split('</think>')[-1].lstrip('\n') }}{{ messages[2].content.split('</think>')[0].split('<think>')[-1] }}
{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith('bc') }}{{ 'abc'.startswith(('x', 'a')) }}{{ 'abc'.endswith('x') }}{{ 'abc'.startswith('') }}
{{ 'héLLo wORLD-x'.upper() }}{{ 'HéLLo'.lower() }}{{ "they're bill's (friends) x-y".title() }}|{{ "they're bill's (friends) x-y" | title }}|{{ 'hELLO' | capitalize }}{{ 'hELLO'.capitalize() }}{{ 'a' | upper }}{{ 'A' | lower }}{{ 5 | upper }}{{ undef | lower }}
{{ 'aXbXc'.replace('X', '--') }}{{ 'aXbXc' | replace('X', '') }}{{ 'aXbXc'.replace('X', '-', 1) }}{{ 'aaa'.replace('aa', 'b') }}
{{ messages | length }}{{ 'héllo' | length }}{{ messages[0] | length }}{{ undef | length }}{{ messages | count }}{{ [] | length }}
{{ undef | default('d') }}{{ undef | default }}{{ '' | default('d') }}{{ '' | default('d', true) }}{{ none | default('d') }}{{ none | d('d', boolean=true) }}{{ messages[0].name | default('anon') }}
{{ messages[0] | tojson }}{{ messages | tojson(indent=2) }}{{ [1, true, none, 'a"\\\n\t\x01é😀</'] | tojson }}{{ {} | tojson }}{{ [] | tojson(indent=4) }}{{ {'a': []} | tojson(indent=1) }}{{ 'x' | tojson }}
{{ ['a', 1, none] | join }}{{ ['a', 1] | join(', ') }}{{ 'abc' | join('-') }}{{ '-'.join(['x', 'y']) }}{{ 'abc' | first }}{{ 'abc' | last }}{{ [1, 2] | first }}{{ [1, 2] | last }}{{ [] | first }}{{ 'abc' | list | length }}{{ 5 | string ~ 'x' }}
{{ x is defined }}{{ messages is defined }}{{ 'a' is string }}{{ 1 is string }}{{ 1 is number }}{{ true is number }}{{ 1 is integer }}{{ true is integer }}{{ true is boolean }}{{ messages is iterable }}{{ messages is sequence }}{{ messages[0] is mapping }}{{ messages is mapping }}{{ 'a' is iterable }}{{ 1 is iterable }}{{ none is iterable }}{{ undef is iterable }}{{ messages[0] is sequence }}
{{ 1 is odd }}{{ 2 is even }}{{ 9 is divisibleby 3 }}{{ 9 is divisibleby(2) }}{{ 1 is eq 1 }}{{ 1 is equalto(2) }}{{ 1 is ne 2 }}{{ true is true }}{{ 1 is true }}{{ false is false }}{{ 'a' is in 'abc' }}{{ 1 is in [2] }}{{ 1 is not string }}{{ x is not defined and true }}{{ x is undefined or false }}
{{ [1, 2] + [3] == [1, 2, 3] }}{{ [1] == (1,) }}{{ {'a': 1} == {'a': 1} }}{{ {'a': 1} == {'a': 2} }}{{ undef == undef2 }}{{ none == undef }}{{ '1' == 1 }}{{ ([1, 2] + [3])[2] }}
{{ "double \"quoted\" \n \x41 \u00e9 \U0001F600 \101 \d \\" }}{{ 'single \'quoted\'' }}{{ 'a' 'b' "c" }}
{{ {'a': 1, 'b': [1, {'c': 2}],}.b[1].c }}{{ dict(a=1, b=2).b }}{{ messages[0].get('role') }}{{ messages[0].get('x') }}{{ messages[0].get('x', 'def') }}{{ (1, 2,)[1] }}{{ () | length }}{{ [1, 2,] | length }}
{{ '{{' }}{{ '%}' }}{{ "#}" }}{% if '%}' == "%}" %}ok{% endif %}{{ {'a': {'b': 1}} | tojson }}{{ {'a': 1}.a}}{{ {'a': {'b': {}}} is mapping}}
{%set x=1%}{{x}}{%if x==1%}y{%endif%}{{x-1}}{{x -1}}{{ - 1 }}{{ not x }}{%for i in[1,2]%}{{i}}{%endfor%}
{{ raise_exception('no') }}
{% if messages[0].role != 'user' %}{{ raise_exception('Conversation must begin with a user: ' ~ messages[0].role) }}{% endif %}
{{ undef.foo }}
{{ undef['foo'] }}
{{ undef[0] }}
{{ undef + 'a' }}
{{ 'a' + 1 }}
{{ 1 + 'a' }}
{{ 'a' + none }}
{{ undef.strip() }}
{{ 1 < 'a' }}
{{ 1 in 'a' }}
{{ 1 // 0 }}
{% for i in 5 %}{% endfor %}
{% for i in none %}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{{ undef | tojson }}
{{ none | length }}
{{ 'a'.split('') }}
{{ [1][::0] }}
{% set x = 1 %}{% set x.y = 2 %}
{{ -'a' }}
{{ messages | raise_exception }}
{% if %}{% endif %}
{% for m in messages %}{% endif %}
{{ 'a' }
{{ 'a }}
{{ }}
{% else %}
{# open
{% set = 1 %}
{% set 1 = 1 %}
{{ a b }}
{{ 1 is string is string }}
{{ (1 }}
{{ 1 +* 2 }}
{% break %}
{% macro f(a, b='x', c=b ~ '!') %}[{{ a }}|{{ b }}|{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(b=3, a=4) }}{{ f() }}{{ f(1, c=5,) | length }}{{ f('é').upper()[1:3] }}
{% macro f(n) %}{{ n }}{% if n > 0 %},{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}{% macro g() %}{{ h() }}{% endmacro %}{% macro h() %}h{% endmacro %}{{ g() }}{{ f is defined }}{{ nof is defined }}
{% set x = 1 %}{% macro f() %}{{ x }}{% set x = 9 %}{{ x }}{% endmacro %}{% set x = 2 %}{{ f() }}{{ x }}{% for x in [7, 8] %}{{ f() }}{% endfor %}{% set ns = namespace(n=0) %}{% macro inc() %}{% set ns.n = ns.n + 1 %}{% endmacro %}{{ inc() }}{{ inc() }}{{ ns.n }}
{% if true %}{% macro f(m) -%}  {{ m.role }} {%- endmacro %}{% endif %}{% for m in messages %}{{ f(m) }};{% endfor %}{{ f(messages[0]) ~ f(messages[1]) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, a=2) }}
{{ f(1) }}{% macro f(a) %}{{ a }}{% endmacro %}
{{ 'y' if 1 is ne 'a' if true else 'n' }}{{ 'y' if 4 is divisibleby(2) if true }}{{ 1 is eq 1 in [true] }}
{{ 'y' if x is defined if true else 'n' }}
{{ x is defined in [false] }}
{% macro f(a=1, b) %}{% endmacro %}
{% macro f(a, b %}{% endmacro %}
{% macro f %}{% endmacro %}
{% for m in [1] %}{% macro f() %}{% break %}{% endmacro %}{% endfor %}
{% macro f(a) %}{{ a.b.c }}{% endmacro %}{{ f({'b': 1}) }}{{ f() }}
{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.index }}/{{ loop.length }}{{ m.content }}{{ loop.last }}{% endfor %}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ (messages | selectattr('role', 'in', ['user', 'system']) | map(attribute='content') | list)[-1] }}{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | join(',') }}{{ messages | selectattr('nope', 'undefined') | list | length }}{{ messages | selectattr('nope') | list | length }}{{ messages | rejectattr('nope') | list | length }}
{{ [1, 2, 3, 4] | select('odd') | join }}{{ [1, 2, 3] | reject('odd') | join }}{{ [0, 1, '', 'a', none] | select | join('|') }}{{ [0, 1, ''] | reject() | list | length }}{{ [1, 'a', none] | select('string') | first }}{{ [6, 7] | select('divisibleby', 3) | join }}
{{ ['a', 'b'] | map('upper') | join }}{{ [' a ', 'b '] | map('trim') | join('|') }}{{ ['axa', 'bxb'] | map('replace', 'x', '-') | join(',') }}{{ messages | map(attribute='content.0') | join }}{{ [[1, 2], [3, 4]] | map(attribute=1) | join }}{{ messages | map('length') | join(',') }}{{ ['a'] | map('default', 'd') | list | length }}
{% set g = [1, 2, 3] | select('number') %}{{ g | first }}{{ g | join }}{{ g | list | length }}{{ g is iterable }}{{ g is sequence }}{{ 'y' if g else 'n' }}{{ 2 in ([1, 2] | select) }}{{ 3 in ([1, 2] | reverse) }}
{{ [1, 2, 3] | reverse | join }}{{ 'héy' | reverse }}{{ {'a': 1, 'b': 2} | reverse | join }}{{ ([1, 2] | reverse | list)[0] }}{{ (1, 2) | reverse | first }}{{ undef | reverse | list | length }}{{ undef | select | list | length }}{{ none | map('upper') | list | length }}{{ 0 | select('odd') | join }}
{{ [1, 2] | select('odd') | length }}
{{ [1, 2] | select('odd') | last }}
{{ 5 | select('odd') | list }}
{{ 5 | reverse }}
{{ [1] | map(attribute='a.b') | list | length }}
{{ ['a'] | select('odd') | list }}{{ 1 }}
{{ [1] | select('odd') | tojson }}
{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2) }}|{{ 'a\n\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent(width=1, blank=true) }}|{{ 'a\r\nb\rc\x0bd\u2028e\x85' | indent('> ') }}|{{ '' | indent(2, true) }}|{{ 'a\n' | indent(1, blank=true) }}|{{ messages | tojson(indent=2) | indent(4) }}
{{ undef | indent }}
{{ 'aé😀\x7f"\n' | tojson }}{{ 'aé😀\x7f"\n' | tojson(ensure_ascii=true) }}{{ ['é'] | tojson(ensure_ascii=false, indent=1) }}
a{% generation %}b{% set x = 1 %}{{ x }}{% endgeneration %}c{{ x is defined }}{% for m in messages %}{%- generation -%} {{ m.role }} {%- endgeneration -%}{% endfor %}
""".strip("\n")

BLOCKS = [
    r"""a{# comment #}b{#- comment -#} c {#+ x +#} d {# multi
line #}
e
""",
    r"""
  {% if true %}
    indented
  {% endif %}
  {%- if true %} trimmed {%- endif %}
  {%+ if true %} kept {% endif %}
tail {{- ' x ' -}} tail {{ 1 }}
  {{ 2 }}
	{% set y = 1 %}  after
{% if true -%}

  x

{%- endif %}
end

""",
    "a\r\n  {% set x = 'p\r\nq' %}\r\n{{ x }}\rb\r\n",
    "{{ 'line\\\njoined' }}\n\n",
    "  {# c #}  \n  {%- set x = 1 %}  \n {{ x }} \n\t{% if x -%} \n y {% endif +%}\nz {%+ if x +%}\n{% endif %}",
    # In the manner of the templates of well-known models.
    """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '<s>' + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' '  + content.strip() + ' ' + '</s>' }}
    {% endif %}
{% endfor %}
""",
    """{{- '<|begin|>' }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{#- the system message, if any #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- else %}
        {{- raise_exception("no tools") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
]


class Random:
    """Random templates of the supported language."""

    def __init__(self, seed):
        self.r = random.Random(seed)

    def atom(self):
        return self.r.choice(["0", "1", "2", "7", "'a'", "'b c'", "'é-x'", "''", "' \\n'", "true", "false", "none", "undef", "messages",
                              "messages[0]", "messages[1].content", "messages[2]['content']", "messages[0].role", "[1, 'a']", "[]", "('x', 2)",
                              "{'a': 1, 'b': 'x'}", "v", "w", "add_generation_prompt"])

    def expr(self, d):
        if d <= 0 or self.r.random() < 0.15:
            return self.atom()
        e = lambda: self.expr(d - 1)  # noqa: E731
        c = self.r.randrange(14)
        if c < 3:
            return f"{e()} {self.r.choice(['+', '-', '*', '//', '%', '~', '~', '+'])} {e()}"
        if c < 5:
            return f"{e()} {self.r.choice(['==', '!=', '<', '<=', '>', '>=', 'in', 'not in'])} {e()}"
        if c == 5:
            return f"{e()} {self.r.choice(['and', 'or'])} {e()}"
        if c == 6:
            return self.r.choice([f"not {e()}", f"-{self.atom()}", f"({e()})", f"({e()})"])
        if c == 7:
            return f"{e()} if {e()} else {e()}"
        if c == 8:
            f = self.r.choice(["trim", "upper", "lower", "title", "capitalize", "length", "default('d')", "default('d', true)", "tojson", "string",
                               "list", "first", "last", "join('+')", "join", "replace('a', 'zz')", "trim('a')", "tojson(indent=2)",
                               "select | list", "reject('string') | list", "selectattr('role', 'equalto', 'user') | list", "map('upper') | join",
                               "map(attribute='content') | join('|')", "reverse | list", "rejectattr('role') | list", "map('length') | list", "indent(2)",
                               "indent('-', true, true)", "select('in', 'abc') | first"])
            return f"({e()}) | {f}"
        if c == 9:
            t = self.r.choice(["defined", "undefined", "none", "string", "number", "integer", "boolean", "mapping", "sequence", "iterable", "true",
                               "false", "odd", "even", "divisibleby 2", "eq 1", "ne 'a'", "in 'abc'"])
            return f"({e()}) is {self.r.choice(['', '', 'not '])}{t}"
        if c == 10:
            m = self.r.choice(["strip()", "lstrip()", "rstrip('\\n x')", "split()", "split('a')", "split(',', 1)", "upper()", "title()", "startswith('a')",
                               "endswith('x')", "replace('a', 'b')", "get('role')", "items() | list | length", "capitalize()", "lower()"])
            return f"({e()}).{m}"
        if c == 11:
            n = lambda: self.r.choice(["", "", "0", "1", "2", "-1", "-2", "5", "-9"])  # noqa: E731
            s = self.r.choice(["", "", ":", ":1", ":2", ":-1", ":-2"])
            return f"({e()})[{n()}:{n()}{s}]"
        if c == 12:
            return f"({e()})[{e()}]"
        return f"({e()}).{self.r.choice(['role', 'content', 'a', 'zzz'])}"

    def space(self):
        return self.r.choice(["", "", " ", "\n", "  ", "\n\n", "\t", " x", "x\n", "\n  ", " \n x "])

    def tag(self, inside):
        a, b = self.r.choice(["", "", "", "-", "+"]), self.r.choice(["", "", "", "-", "+"])
        return "{%" + a + " " + inside + " " + b + "%}"

    def stmt(self, d):
        c = self.r.randrange(9)
        if d <= 0 or c < 3:
            a, b = self.r.choice(["", "", "-"]), self.r.choice(["", "", "-"])
            return "{{" + a + " " + self.expr(3) + " " + b + "}}"
        body = lambda: self.body(d - 1)  # noqa: E731
        if c == 3:
            return self.tag("if " + self.expr(2)) + body() + self.r.choice(["", self.tag("else") + body(), self.tag("elif " + self.expr(1)) + body()]) + self.tag("endif")
        if c == 4:
            over = self.r.choice(["messages", "range(3)", "'héy'", "[1, 'a', none]", "messages[1:]", self.expr(2)])
            cond = self.r.choice(["", "", " if v is string", " if v"])
            jump = self.r.choice(["", "", "", self.tag("if loop.index == 2") + self.tag(self.r.choice(["break", "continue"])) + self.tag("endif")])
            return self.tag(f"for v in {over}{cond}") + "{{ loop.index }}" + jump + body() + self.r.choice(["", self.tag("else") + body()]) + self.tag("endfor")
        if c == 5:
            return self.tag(f"set {self.r.choice(['v', 'w'])} = {self.expr(2)}")
        if c == 6:
            return self.tag("set w") + body() + self.tag("endset")
        if c == 7:
            params, call = self.r.choice([("", ""), ("v", self.expr(1)), ("v, x=1", self.expr(2)), ("v=w", "v=" + self.expr(1)), ("x, v=x", "x='q'"), ("v, w", "w=" + self.expr(1))])
            return self.tag(f"macro f{d}({params})") + body() + self.r.choice(["", "{{ x }}"]) + self.tag("endmacro") + f"{{{{ f{d}({call})" + self.r.choice(["", " | length", " | trim", " * 2"]) + " }}"
        return self.r.choice(["{# c #}", "{#- c -#}", "{# a\n b #}"])

    def body(self, d):
        return "".join(self.space() + self.stmt(d) for _ in range(self.r.randrange(1, 4))) + self.space()


class Refused(Exception):
    """Something that we refuse on purpose: a container or a float that becomes text."""


def strict(x):
    if x is not None and not isinstance(x, (str, bool, int, jinja2.Undefined)):
        raise Refused()
    return str(x)


def strict_only():
    """Makes Jinja raise Refused wherever it would write a Python object, so that random cases are about the language."""
    jinja2.runtime.str_join = lambda parts: "".join(map(strict, parts))
    jinja2.filters.soft_str = strict
    ENV.filters["string"] = strict
    ENV.filters["join"] = lambda value, d="": strict(d).join(map(strict, value))
    ENV.filters["replace"] = lambda s, old, new, count=-1: strict(s).replace(old, new, count)

    def not_constant(self, eval_ctx=None):
        raise jinja2.nodes.Impossible()

    jinja2.nodes.Concat.as_const = not_constant
    original = ENV.getitem

    def getitem(obj, arg):
        if isinstance(arg, slice):
            raise Refused()  # only reached for constants, where Jinja takes a slice of a number for undefined
        return original(obj, arg)

    def modulo(left, right):
        if isinstance(left, str):
            raise Refused()
        return left % right

    ENV.getitem = getitem
    ENV.intercepted_binops = frozenset("%")
    ENV.binop_table = {**ENV.binop_table, "%": modulo}
    ENV.finalize = lambda x: x if x is None or isinstance(x, str) else strict(x)
    ENV.cache = None


def render(template, messages, generate):
    try:
        return ENV.from_string(template).render(messages=messages, tools=None, documents=None, add_generation_prompt=generate, bos_token="<s>", eos_token="</s>")
    except (jinja2.exceptions.TemplateError, TypeError, ValueError, ZeroDivisionError, AttributeError, KeyError, SyntaxError):
        return None


TURNS = [{"role": "user", "content": " Who wrote\n»Momo«? "}, {"role": "assistant", "content": "<think>\nEnde, I think.\n</think>\n\nMichael Ende.\n"},
         {"role": "user", "content": "When?"}, {"role": "assistant", "content": "1973"}, {"role": "user", "content": "Thanks 😀"}]
SYSTEM = {"role": "system", "content": " Be brief.\n"}
CHATS = [TURNS[:1], TURNS[:2], TURNS[:3], TURNS, [SYSTEM] + TURNS[:1], [SYSTEM] + TURNS[:4], [SYSTEM] + TURNS, TURNS[:1] + TURNS[:1], TURNS[1:], TURNS[:2] + [SYSTEM] + TURNS[2:],
         [SYSTEM], TURNS[:2] + [{"role": "tool", "content": "{\"a\": 1}"}] + TURNS[3:4], [{"role": "user", "content": ""}], [{"role": "system", "content": ""}] + TURNS[:1],
         [SYSTEM, SYSTEM] + TURNS[:1], [{"role": "developer", "content": "x"}] + TURNS[:1], [{"role": "user", "content": "a\n b\n\n\tc\r\nd"}, {"role": "assistant", "content": "</think>x<think>"}]]


def families():
    """Every template of families/ with every chat."""
    folder = Path(__file__).parent / "families"
    for name, known in json.loads((folder / "families.json").read_text()).items():
        template = ENV.from_string((folder / (name + ".jinja")).read_text())
        special = {key + "_token": known[key] for key in ("bos", "eos") if known[key]}
        for i, chat in enumerate(CHATS):
            for generate in (True, False):
                try:
                    text = template.render(messages=chat, tools=None, documents=None, add_generation_prompt=generate, **special)
                except (jinja2.exceptions.TemplateError, TypeError):
                    text = None
                yield {"family": name, "chat": i, "generate": generate, "text": text}


def main():
    warnings.simplefilter("ignore")
    seed, count, path = (sys.argv[1:] + ["1", "400", "cases.json"][len(sys.argv) - 1:])[:3]
    rendered = list(families())
    cases = []
    for t in LINES.split("\n") + BLOCKS:
        for chat, generate in ((CHAT, True), (CHAT[1:2], False)):
            cases.append({"template": t, "messages": chat, "generate": generate, "text": render(t, chat, generate)})
    r = Random(int(seed))
    strict_only()
    n = 0
    while n < int(count):
        t = r.body(2)
        try:
            text = render(t, CHAT, True)
        except Refused:
            continue
        if text is None and r.r.random() < 0.9:
            continue  # most random templates are wrong; they are less worth than the right ones
        n += 1
        cases.append({"template": t, "messages": None, "generate": True, "text": text})
    out = {"about": "messages null means those of the first case", "engine": "jinja2 " + jinja2.__version__ + ", " + __doc__.split("\n")[0],
           "cases": cases, "chats": CHATS, "families": rendered}
    Path(path).write_text(json.dumps(out, ensure_ascii=True, separators=(", ", ": ")).replace('{"template"', '\n{"template"').replace('{"family"', '\n{"family"') + "\n")
    print(len(cases), sum(c["text"] is None for c in cases), "raise;", len(rendered), sum(c["text"] is None for c in rendered), "raise")


main()
