"""The two log formats on stderr: a JSON object or a text per record, on one line unless there is a traceback.

``auto`` is text on a terminal, and JSON elsewhere.

Callers' text is never logged on purpose. If it is part of an error's text, it still cannot forge a line or control a
terminal: control characters are escaped in both formats.
"""

import json
import logging
import sys
import time
from typing import Any

import msgspec

FORMATS = ("auto", "json", "text")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OUR_TEXT = "%(asctime)s %(levelname)s %(message)s"
_TIME = "%H:%M:%S"
_OURS = "neaptide"
# C0, DEL, C1 and the two separators that some readers take for line ends.
_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
_CONTROLS_IN_TRACEBACK = {code: text for code, text in _CONTROLS.items() if code != ord("\n")}


def one_line(text: str) -> str:
    """``text`` as one safe line for the operator."""
    return " ".join(text.split()).translate(_CONTROLS)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger and message; or a request's record instead of the message."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
        }
        request = getattr(record, "request", None)
        line |= {"message": record.getMessage()} if request is None else msgspec.to_builtins(request)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # The encoder outputs ASCII, of which only DEL is still a control character.
        return json.dumps(line).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """Format for people: time of day, level, message. A traceback follows on lines of its own; a request's record is
    told in words. Loggers of other packages are named."""

    def __init__(self) -> None:
        super().__init__(_TEXT, _TIME)
        self._ours = logging.Formatter(_OUR_TEXT, _TIME)

    def formatMessage(self, record: logging.LogRecord) -> str:
        request = getattr(record, "request", None)
        if request is not None:
            record.message = request.in_words()
        is_ours = record.name.startswith(_OURS)
        line = self._ours.formatMessage(record) if is_ours else super().formatMessage(record)
        return line.translate(_CONTROLS)

    def formatException(self, ei: Any) -> str:
        return super().formatException(ei).translate(_CONTROLS_IN_TRACEBACK)


def resolved(form: str) -> str:
    """The format that ``auto`` stands for on this process's stderr; others as they are."""
    if form != "auto":
        return form
    return "text" if sys.stderr.isatty() else "json"


def configure_logging(level: str, form: str) -> None:
    """Sends all logs of this process, including the web server's and warnings, to stderr."""
    form = resolved(form)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Its logger ``uvicorn.error`` is no error log: at INFO it tells that the server started, as we do.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
