"""A function call that the model is made to write. Needs a server (`neaptide serve`) and `pip install openai`."""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("NEAPTIDE_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("NEAPTIDE_API_KEY", "none"),
)
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the weather in paris?"}],
    temperature=0,
    tools=[
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                },
            },
        }
    ],
    tool_choice="required",
)
for call in answer.choices[0].message.tool_calls or []:
    if call.type == "function":
        print(call.function.name, json.loads(call.function.arguments))
