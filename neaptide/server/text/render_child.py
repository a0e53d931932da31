"""Child process that renders chat templates, which are code from a model directory. It may be killed at any time.

``python -m neaptide.server.text.render_child MEMORY_BYTES`` reads frames of JSON from standard input, and answers each
on standard output. The first one has the templates; the answer is empty, or says why one cannot be used. Each other one
is a conversation, with the processor time that it may take: more than that ends the process by a signal.
"""

import json
import signal
import sys
from typing import Any

from neaptide.engine.process.parent import ignore_stop_signals
from neaptide.server.http.errors import ContextLengthError, InvalidRequestError
from neaptide.server.subprocesses.child import bound_memory, pipes
from neaptide.server.subprocesses.frames import read_frame, write_frame
from neaptide.server.text.chat_template import ChatTemplate, TemplateInput


def main(memory_bytes: int) -> int:
    ignore_stop_signals()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, sink = pipes()
    first = read_frame(source)
    if first is None:
        return 0
    bound_memory(memory_bytes, beside_what_is_here=True)
    known = json.loads(first)
    signal.setitimer(signal.ITIMER_PROF, known["cpu_s"])
    try:
        templates = {name: ChatTemplate(text, known["special_tokens"]) for name, text in known["sources"].items()}
    except ValueError as error:
        write_frame(sink, str(error).encode(errors="replace"))
        return 1
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    write_frame(sink, b"")
    while (frame := read_frame(source)) is not None:
        job = json.loads(frame)
        signal.setitimer(signal.ITIMER_PROF, job.pop("cpu_s"))
        answer = _answer(templates[job.pop("template")], TemplateInput(**job))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(sink, json.dumps(answer).encode())
    return 0


def _answer(template: ChatTemplate, given: TemplateInput) -> dict[str, Any]:
    try:
        return {"text": template.render(given)}
    except ContextLengthError as error:
        return {"too_long": error.message, "param": error.param}
    except InvalidRequestError as error:
        return {"refused": error.message, "param": error.param, "code": error.code}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
