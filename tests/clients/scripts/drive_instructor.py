"""Runs in the environment of ``instructor``: one mode a run; what it made is printed as JSON."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Side(BaseModel, extra="forbid"):  # else a weak model goes on with properties of its own
    """A side."""

    side: Literal["left", "right"]
    steps: int = Field(ge=0, le=9)


class Anything(BaseModel):
    pass


def main(mode: str, base_url: str) -> None:
    plain = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    asked = {"model": "neaptide-tiny", "temperature": 0, "max_tokens": 300, "max_retries": 1}
    asked["messages"] = [{"role": "user", "content": "Which side?"}]
    if mode != "JSON":
        print(json.dumps(client.chat.completions.create(**asked, response_model=Side).model_dump()))
        return
    try:  # no schema reaches the server: what comes is an object, or was cut
        _, raw = client.chat.completions.create_with_completion(**asked, response_model=Anything)
    except instructor.exceptions.IncompleteOutputException as error:
        raw = error.last_completion
    print(json.dumps({"text": raw.choices[0].message.content}))


if __name__ == "__main__":
    main(*sys.argv[1:])
