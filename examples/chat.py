"""One chat and one stream. Needs a server (`neaptide serve`) and `pip install openai`."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("NEAPTIDE_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("NEAPTIDE_API_KEY", "none"),
)
model = client.models.list().data[0].id

# Latency targets are for this request alone; without them the server's own count.
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is 21 + 34?"}],
    temperature=0,
    extra_body={"ttft_slo_ms": 500, "tpot_slo_ms": 50},
)
print(answer.choices[0].message.content)

# A flex request has no target: it waits behind every chat that has one.
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is 7 + 5?"}],
    temperature=0,
    service_tier="flex",
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
