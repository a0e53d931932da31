"""Process that measures a batch file for a quote: lines, bytes of prompts, and how many of them are shared prefixes.

``python -m neaptide.server.quotes.measure`` reads tasks from its standard input and answers on its standard output. It
keeps the work off the event loop, imports nothing large, and runs at low priority with bounded memory.
"""

import traceback
from pathlib import Path

import msgspec

from neaptide.server.subprocesses.child import bound_memory, pipes, set_idle_priority
from neaptide.server.subprocesses.frames import read_frame, write_frame

NICENESS = 5
"""A caller waits for the answer, so it is less than that of other child processes."""
MEMORY_BYTES = 2 << 30
_BOM = b"\xef\xbb\xbf"


class MeasureTask(msgspec.Struct, frozen=True):
    path: str
    max_lines: int
    num_samples: int
    """Most lines to return, spread evenly over the file."""
    sample_bytes: int
    """Most bytes of the returned lines."""


class FileSize(msgspec.Struct, frozen=True):
    """Size of a file, or the fault for which it is no batch file."""

    num_lines: int = 0
    prompt_bytes: int = 0
    """JSON text of the prompts of all lines."""
    new_bytes: int = 0
    """The same without the beginnings that an earlier line has, if lines are sorted."""
    samples: list[bytes] = []
    """Whole lines."""
    sample_bytes: list[int] = []
    """Bytes of the prompt of each of them."""
    fault: str = ""


class PromptParts(msgspec.Struct):
    """Parts of a body that become the prompt."""

    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class MeasuredLine(msgspec.Struct):
    url: str
    body: PromptParts


_line_decoder = msgspec.json.Decoder(MeasuredLine)
task_encoder, task_decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(MeasureTask)
size_encoder, size_decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FileSize)


def prompt_of(body: PromptParts) -> bytes:
    """The JSON text of the parts of a body that become the prompt, in the order in which templates write them."""
    return b"".join((body.tools, body.instructions, body.messages, body.prompt, body.input))


def measured(content: bytes, task: MeasureTask) -> FileSize:
    """Measures the content of a file."""
    lines = content.removeprefix(_BOM).split(b"\n")
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    if not numbers:
        return FileSize(fault="The file has no lines.")
    if len(numbers) > task.max_lines:
        return FileSize(fault=f"The file has more than {task.max_lines} lines.")
    prompts: list[bytes] = []
    for number in numbers:
        try:
            line = _line_decoder.decode(lines[number])
            prompt = prompt_of(line.body)
        except msgspec.MsgspecError:
            return FileSize(fault=f"Line {number + 1} is no request with a url and a body.")
        prompts.append(prompt)
    chosen = sampled([len(lines[number]) for number in numbers], task)
    return FileSize(
        len(prompts),
        sum(map(len, prompts)),
        new_bytes(prompts),
        [lines[numbers[k]] for k in chosen],
        [len(prompts[k]) for k in chosen],
    )


def sampled(line_bytes: list[int], task: MeasureTask) -> list[int]:
    """Lines that stand for all: evenly spread, as many as the limits allow, one at least."""
    mean_bytes = sum(line_bytes) / len(line_bytes)
    count = max(min(task.num_samples, len(line_bytes), int(task.sample_bytes / mean_bytes)), 1)
    found, found_bytes = [], 0
    spread = [k * len(line_bytes) // count for k in range(count)]
    for k in spread:
        if found_bytes + line_bytes[k] <= task.sample_bytes:
            found.append(k)
            found_bytes += line_bytes[k]
    return found or [min(spread, key=lambda k: line_bytes[k])]


def new_bytes(prompts: list[bytes]) -> int:
    """Bytes of all prompts, each without what it shares with the one before it in sorted order."""
    found, before = 0, b""
    for prompt in sorted(prompts):
        found += len(prompt) - shared_length(before, prompt)
        before = prompt
    return found


def shared_length(a: bytes, b: bytes) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # The first ``low`` bytes are equal, the first ``high`` are not.
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    """Answers tasks one by one until its input ends."""
    set_idle_priority(NICENESS)
    source, sink = pipes()
    bound_memory(MEMORY_BYTES)
    while frame := read_frame(source):
        write_frame(sink, size_encoder.encode(_answer(task_decoder.decode(frame))))


def _answer(task: MeasureTask) -> FileSize:
    try:
        return measured(Path(task.path).read_bytes(), task)
    except MemoryError:
        return FileSize(fault="The file is too large to be measured.")
    except OSError as error:
        return FileSize(fault=f"The file cannot be read now: {error.strerror or 'I/O error'}.")
    except Exception as error:
        # The text says where, but not what: the message may quote the file.
        traceback.print_tb(error.__traceback__)
        return FileSize(fault=f"The file could not be measured ({type(error).__name__}).")


if __name__ == "__main__":
    main()
