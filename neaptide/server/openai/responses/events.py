"""Events of a streamed reply of the Responses API."""

from collections.abc import Sequence

from neaptide.server.http.sse import event
from neaptide.server.openai.replies import RequestMetrics, TokenLogprob
from neaptide.server.openai.respond import Delta, ResponseAssembler
from neaptide.server.openai.responses.replies import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseEvent,
    Status,
    WholeEvent,
)
from neaptide.server.openai.responses.shape import (
    call_item,
    call_status,
    logprobs_of,
    message_item,
    new_id,
    reasoning_item,
    reasoning_part,
    response,
    status_of,
    text_part,
)
from neaptide.server.parsers.calls import CallPiece, ParsedToolCall


class ResponseEvents:
    """Converts the deltas of one request to numbered events, and collects the output items."""

    def __init__(self, assembler: ResponseAssembler, response_id: str) -> None:
        self._assembler = assembler
        self._reply = assembler.reply
        self._id = response_id
        self._number = 0
        self._items: list[OutputItem] = []
        """Finished items."""
        self._message_id: str | None = None
        """Id of the unfinished message."""
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._reasoning_id: str | None = None
        """Id of the unfinished reasoning."""
        self._thoughts: list[str] = []
        self._call_id: str | None = None
        """Id of the unfinished call's item."""
        self._has_begun = False

    def encode(self, delta: Delta) -> bytes:
        """The events of a delta, encoded."""
        return _encoded(self.shape(delta))

    def shape(self, delta: Delta) -> Sequence[ResponseEvent]:
        """Events of a delta; before the first one, those that announce the response."""
        events: list[ResponseEvent] = []
        if not self._has_begun:
            self._has_begun = True
            begun = response(self._reply, self._id, "in_progress", [], None)
            events.append({"type": "response.created", "sequence_number": self._next(), "response": begun})
            events.append({"type": "response.in_progress", "sequence_number": self._next(), "response": begun})
        # The rest of a call that has begun comes before text, and text before new calls.
        num_continued = next((at for at, piece in enumerate(delta.calls) if piece.is_first), len(delta.calls))
        for piece in delta.calls[:num_continued]:
            self._add_arguments(piece, events)
        if delta.reasoning:
            self._end_message("completed", events)
            self._think(delta.reasoning, events)
        if delta.text or (delta.tokens and self._reasoning_id is None):
            self._end_reasoning("completed", events)
            self._write(delta, events)
        for piece in delta.calls[num_continued:]:
            if piece.is_first:
                self._end_reasoning("completed", events)
                self._end_message("completed", events)
                self._begin_call(piece, events)
            self._add_arguments(piece, events)
        if delta.finish_reason is not None:
            status = status_of(delta.finish_reason)
            self._end_reasoning(status, events)
            if not self._items and self._message_id is None:
                self._begin_message(events)  # An empty answer is an item, too.
            self._end_message(status, events)
        return events

    def end(self, metrics: RequestMetrics) -> bytes:
        """The last event, with the whole response, encoded."""
        (choice,) = self._assembler.choices
        status = status_of(choice.finish_reason)
        whole = response(self._reply, self._id, status, self._items, self._assembler.usage())
        last: WholeEvent = {"type": "response.completed", "sequence_number": self._next(), "response": whole}
        if status == "incomplete":
            last["type"] = "response.incomplete"
        return _encoded([last])

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    @property
    def _index(self) -> int:
        return len(self._items)

    def _write(self, delta: Delta, events: list[ResponseEvent]) -> None:
        if self._message_id is None:
            self._begin_message(events)
        assert self._message_id is not None
        logprobs = logprobs_of(self._reply, delta.tokens)
        self._text.append(delta.text)
        self._logprobs += logprobs
        events.append(
            {
                "type": "response.output_text.delta",
                "sequence_number": self._next(),
                "output_index": self._index,
                "item_id": self._message_id,
                "content_index": 0,
                "delta": delta.text,
                "logprobs": logprobs,
            }
        )

    def _think(self, text: str, events: list[ResponseEvent]) -> None:
        if self._reasoning_id is None:
            item_id = self._reasoning_id = new_id("rs")
            self._thoughts = []
            events.append(self._item_event("added", reasoning_item(self._reply, item_id, "in_progress", None)))
            events.append(self._part_event("added", item_id, reasoning_part("")))
        self._thoughts.append(text)
        events.append(
            {
                "type": "response.reasoning_text.delta",
                "sequence_number": self._next(),
                "output_index": self._index,
                "item_id": self._reasoning_id,
                "content_index": 0,
                "delta": text,
            }
        )

    def _end_reasoning(self, status: Status, events: list[ResponseEvent]) -> None:
        item_id, self._reasoning_id = self._reasoning_id, None
        if item_id is None:
            return
        text = "".join(self._thoughts)
        events.append(
            {
                "type": "response.reasoning_text.done",
                "sequence_number": self._next(),
                "output_index": self._index,
                "item_id": item_id,
                "content_index": 0,
                "text": text,
            }
        )
        events.append(self._part_event("done", item_id, reasoning_part(text)))
        self._add_done(reasoning_item(self._reply, item_id, status, text), events)

    def _begin_message(self, events: list[ResponseEvent]) -> None:
        item_id = self._message_id = new_id("msg")
        self._text, self._logprobs = [], []
        item = message_item(item_id, "in_progress", [])
        events.append(self._item_event("added", item))
        events.append(self._part_event("added", item_id, text_part("", [])))

    def _end_message(self, status: Status, events: list[ResponseEvent]) -> None:
        item_id, self._message_id = self._message_id, None
        if item_id is None:
            return
        text = "".join(self._text)
        events.append(
            {
                "type": "response.output_text.done",
                "sequence_number": self._next(),
                "output_index": self._index,
                "item_id": item_id,
                "content_index": 0,
                "text": text,
                "logprobs": self._logprobs,
            }
        )
        events.append(self._part_event("done", item_id, text_part(text, self._logprobs)))
        self._add_done(message_item(item_id, status, [text_part(text, self._logprobs)]), events)

    def _begin_call(self, piece: CallPiece, events: list[ResponseEvent]) -> None:
        self._call_id = new_id("fc")
        call = self._call_of(piece)
        events.append(self._item_event("added", call_item(self._call_id, call, "in_progress", has_arguments=False)))

    def _add_arguments(self, piece: CallPiece, events: list[ResponseEvent]) -> None:
        assert self._call_id is not None
        if piece.arguments:
            events.append(
                {
                    "type": "response.function_call_arguments.delta",
                    "sequence_number": self._next(),
                    "output_index": self._index,
                    "item_id": self._call_id,
                    "delta": piece.arguments,
                }
            )
        if not piece.is_last:
            return
        call = self._call_of(piece)
        events.append(
            {
                "type": "response.function_call_arguments.done",
                "sequence_number": self._next(),
                "output_index": self._index,
                "item_id": self._call_id,
                "arguments": call.arguments,
            }
        )
        self._add_done(call_item(self._call_id, call, call_status(call)), events)

    def _call_of(self, piece: CallPiece) -> ParsedToolCall:
        """The call; with all its arguments if the piece is its last."""
        return self._assembler.choices[0].calls[piece.index]

    def _add_done(self, item: OutputItem, events: list[ResponseEvent]) -> None:
        events.append(self._item_event("done", item))
        self._items.append(item)

    def _item_event(self, what: str, item: OutputItem) -> ResponseEvent:
        return {
            "type": "response.output_item.added" if what == "added" else "response.output_item.done",
            "sequence_number": self._next(),
            "output_index": self._index,
            "item": item,
        }

    def _part_event(self, what: str, item_id: str, part: OutputText | ReasoningText) -> ResponseEvent:
        return {
            "type": "response.content_part.added" if what == "added" else "response.content_part.done",
            "sequence_number": self._next(),
            "output_index": self._index,
            "item_id": item_id,
            "content_index": 0,
            "part": part,
        }


def _encoded(events: Sequence[ResponseEvent]) -> bytes:
    return b"".join(event(data, data["type"]) for data in events)
