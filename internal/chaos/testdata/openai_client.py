"""Talks to a router with the real openai client: openai_client.py BASE_URL"""
import sys

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)

models = client.models.list().data
assert len(models) == 1 and models[0].object == "model", models

messages = [{"role": "user", "content": "What is a bridge?"}]
whole = client.chat.completions.create(model=models[0].id, messages=messages, temperature=0)
choice = whole.choices[0]
assert choice.finish_reason == "stop" and choice.message.role == "assistant" and choice.message.content, whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens > 2, whole.usage

text, events, usage, finish = "", 0, None, None
for chunk in client.chat.completions.create(model=models[0].id, messages=messages, temperature=0, stream=True,
                                            stream_options={"include_usage": True}):
    if chunk.usage:
        usage = chunk.usage
    for c in chunk.choices:
        events += 1
        text += c.delta.content or ""
        finish = c.finish_reason or finish
assert text == choice.message.content, (text, choice.message.content)
assert finish == "stop" and usage == whole.usage, (finish, usage, whole.usage)
assert events == usage.completion_tokens + 1, (events, usage)  # one event a token, and the last one

many = client.completions.create(model=models[0].id, prompt=["The moon is", "A computer is"], n=2, temperature=0.8, seed=3, max_tokens=6, logprobs=2)
assert [c.index for c in many.choices] == [0, 1, 2, 3], many
assert all(len(c.logprobs.token_logprobs) <= 6 and len(c.logprobs.tokens) == len(c.logprobs.top_logprobs) for c in many.choices), many
assert many.choices[0].text != many.choices[1].text or many.choices[2].text != many.choices[3].text, many

try:
    client.chat.completions.create(model=models[0].id, messages=messages, temperature=9000)
except BadRequestError as e:
    assert e.body["code"] == "invalid_request" and e.body["param"] == "temperature", e.body
else:
    raise AssertionError("a temperature of 9000 was taken")
print("ok", len(models), events)
