"""An answer that is JSON of a class. Needs a server (`neaptide serve`) and `pip install openai`."""

import os

import pydantic
from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("NEAPTIDE_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("NEAPTIDE_API_KEY", "none"),
)
model = client.models.list().data[0].id


class Sum(pydantic.BaseModel):
    working: str
    answer: int


answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "What is 21 + 34? Answer in JSON."}],
    temperature=0,
    response_format=Sum,
)
print(answer.choices[0].message.parsed)
