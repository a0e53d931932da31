"""A batch file from upload to results. Needs a server (`neaptide serve`) and `pip install openai`."""

import json
import os
import time

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("NEAPTIDE_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("NEAPTIDE_API_KEY", "none"),
)
model = client.models.list().data[0].id

lines = [
    {
        "custom_id": f"sum-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": f"What is {number} + 34?"}],
            "max_completion_tokens": 32,
            "temperature": 0,
        },
    }
    for number in range(10, 20)
]
content = "\n".join(map(json.dumps, lines)).encode()
file = client.files.create(file=("sums.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

# The server may be stopped meanwhile: it goes on with the batch when it starts again.
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)

if batch.output_file_id is not None:
    for line in client.files.content(batch.output_file_id).iter_lines():
        result = json.loads(line)
        print(result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"])
