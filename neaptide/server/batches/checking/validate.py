"""Checks a whole input file: the result is a job, or a list of errors. Blocking; for a worker.

All or nothing: one malformed line fails the batch before anything runs. A well-formed line whose *body* the endpoint
would refuse (a temperature of 9) is not malformed. It ends at once with the reply that the endpoint would have given.
"""

import json
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from neaptide.server.batches.checking.job_files import PlanWriter
from neaptide.server.batches.checking.unreadable import unreadable
from neaptide.server.batches.lines import CompiledLine, LineCompiler
from neaptide.server.batches.served import Abilities, is_model_name
from neaptide.server.batches.storing.models import LineResult, LineState, NewLine
from neaptide.server.http.errors import ApiError, InvalidRequestError, UnavailableError, is_passing
from neaptide.server.http.jsonbody import MAX_BODY_BYTES, parse_json
from neaptide.server.openai.stored_replies import BatchError

MAX_ERRORS = 100
MAX_CUSTOM_ID_CHARS = 512
LINES_PER_GROUP = 256
MAX_TRIES = 3
"""Number of tries of a line with a temporary fault, before the whole file has to wait."""
_BOM = b"\xef\xbb\xbf"
_PROMPT_FIELD = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
ENDPOINTS = tuple(_PROMPT_FIELD)


@dataclass(frozen=True, slots=True)
class FileLimits:
    max_lines: int = 50_000
    max_prompt_tokens: int = 1 << 28
    """Prompt tokens of all choices of all lines; 4 bytes each on disk."""


class RawLine(NamedTuple):
    line_no: int
    byte_offset: int
    content: bytes
    """The line without its newline, cut off after ``MAX_BODY_BYTES``."""


class LineFault(Exception):
    """Error of one line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    def entry(self, line_no: int | None) -> BatchError:
        return {"code": self.code, "line": line_no, "message": self.message, "param": self.param}


@dataclass(slots=True)
class CheckReport:
    """Result of a check. The job can start if ``errors`` is empty."""

    errors: list[BatchError] = field(default_factory=list)
    num_lines: int = 0
    num_rows: int = 0
    model: str = ""
    is_foreign: bool = False
    """Whether the lines name ``model``, which another server may have. Nothing else about them is known then."""
    plan_digest: str = ""
    """Hash of the job's plan when it was written."""


@dataclass(frozen=True, slots=True)
class Check:
    """One file to be checked for one batch."""

    endpoint: str
    path: str
    stem: str
    """Where the job's plan is written."""
    limits: FileLimits
    share: str = ""
    """Key that the check is charged to, as named in the scheduler's shares."""
    others: tuple[Abilities, ...] | None = None
    """Abilities of the servers that may run lines that this one cannot, longest context first; None for a single
    server."""


Keep = Callable[[Sequence[NewLine]], Coroutine[Any, Any, None]]
"""Stores a group of lines."""


class _ForeignModelError(Exception):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class CheckerDiedError(Exception):
    """The process that checked the file ended, and only some lines are stored.

    ``by_itself``: it was not killed, so the file may have crashed it.
    """

    def __init__(self, message: str, *, by_itself: bool = True) -> None:
        super().__init__(message)
        self.by_itself = by_itself


class Checker(Protocol):
    """Checks files, one of each key at a time, off the event loop."""

    async def check(self, check: Check, keep: Keep) -> CheckReport:
        """Checks a file; returns when all lines are stored and the plan is durable.

        Cancelling it stops the work, and waits until nothing more is written.

        Raises:
            CheckerDiedError: a retry may succeed.
            UnavailableError: a retry may succeed; the machine is too busy now.
            OSError: a file cannot be read or written.
        """
        ...

    async def close(self) -> None: ...


def read_lines(path: Path) -> Iterator[RawLine]:
    """Lines that are not blank, split at ``\\n`` only, with their physical numbers."""
    with path.open("rb") as f:
        offset, line_no = 0, 0
        if f.read(3) == _BOM:
            offset = 3
        f.seek(offset)
        while content := f.readline(MAX_BODY_BYTES + 2):
            line_no += 1
            begin = offset
            offset += len(content)
            while not content.endswith(b"\n") and (rest := f.readline(MAX_BODY_BYTES)):
                offset += len(rest)
                if rest.endswith(b"\n"):
                    break
            content = content.removesuffix(b"\n")
            if content.strip(b" \t\r"):
                yield RawLine(line_no, begin, content)


def read_body(file: BinaryIO, byte_offset: int, num_bytes: int) -> dict[str, Any]:
    """The body of a line that has passed validation."""
    file.seek(byte_offset)
    line = parse_json(file.read(num_bytes))
    if not isinstance(line, dict) or not isinstance(line.get("body"), dict):
        raise ValueError("the input file has changed")
    body: dict[str, Any] = line["body"]
    return body


class Validator:
    """One validation of one batch.

    Args:
        keep: stores groups of lines.
        pause: called after every line; returns when the check may go on.
    """

    def __init__(
        self,
        check: Check,
        compiler: LineCompiler,
        keep: Callable[[Sequence[NewLine]], None],
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._c = check
        self._served = compiler.served
        self._compilers = [compiler, *map(compiler.on, check.others or ())]
        """Abilities of this server, then of others."""
        self._keep = keep
        self._pause = pause
        self._custom_ids: set[str] = set()
        self._group: list[NewLine] = []
        self._report = CheckReport()
        self._num_errors = 0

    def run(self) -> CheckReport:
        """Checks the file and writes the job's plan.

        Raises:
            UnavailableError: the machine is too busy now.
            OSError: a file cannot be read or written.
        """
        plan = PlanWriter(Path(self._c.stem))
        try:
            self._check_lines(Path(self._c.path), plan)
            if not self._report.num_lines:
                self._add_error(LineFault("empty_file", "The input file has no requests."), None)
            if self._report.errors:
                self._say_what_is_left_out()
                plan.abandon()
            else:
                self._keep(self._group)
                plan.close()
        except _ForeignModelError as error:
            plan.abandon()
            return CheckReport(model=error.model, is_foreign=True)
        except BaseException:
            plan.abandon()
            raise
        self._report.num_rows, self._report.plan_digest = plan.num_rows, plan.digest
        return self._report

    def _check_lines(self, path: Path, plan: PlanWriter) -> None:
        # Counted first, so that a file that is too large fails before it has been tokenized for a minute.
        limits = self._c.limits
        self._report.num_lines = sum(1 for _ in islice(read_lines(path), 1 + limits.max_lines))
        if self._report.num_lines > limits.max_lines:
            fault = LineFault("too_many_tasks", f"A batch has at most {limits.max_lines} requests.")
            self._add_error(fault, None)
            return
        for raw in read_lines(path):
            self._pause()
            try:
                custom_id, body = self._check(raw.content)
            except LineFault as found:
                self._add_error(found, raw.line_no)
                continue
            # Tokenizing is most of the work, and useless once the batch is known to fail.
            if not self._report.errors:
                self._compile(raw, custom_id, body, plan)
            if plan.num_tokens > limits.max_prompt_tokens:
                fault = LineFault("token_limit_exceeded", "The prompts of the batch have too many tokens.")
                self._add_error(fault, None)
                return

    def _add_error(self, fault: LineFault, line_no: int | None) -> None:
        self._num_errors += 1
        if len(self._report.errors) < MAX_ERRORS:
            self._report.errors.append(fault.entry(line_no))

    def _say_what_is_left_out(self) -> None:
        more = self._num_errors - len(self._report.errors)
        if more > 0:
            fault = LineFault("too_many_errors", f"{more} more errors are not listed.")
            self._report.errors.append(fault.entry(None))

    def _compile(self, raw: RawLine, custom_id: str, body: dict[str, Any], plan: PlanWriter) -> None:
        first_row, result = plan.num_rows, None
        try:
            plan.append(self._compiled(body))
        except ApiError as error:
            result = refused(raw.line_no, error)
        num_rows = plan.num_rows - first_row
        self._group.append(
            NewLine(raw.line_no, custom_id, raw.byte_offset, len(raw.content), first_row, num_rows, result)
        )
        if len(self._group) == LINES_PER_GROUP:
            self._keep(self._group)
            self._group = []

    def _compiled(self, body: dict[str, Any]) -> CompiledLine:
        """Compiles a line for this server; if it cannot run all of it, for another server.

        Raises:
            ApiError: no server can run it; the error is that of the server with the longest context.
        """
        cut: CompiledLine | None = None
        refusals: list[tuple[int, ApiError]] = []
        for compiler in self._compilers:
            try:
                line = self._patiently_compiled(compiler, body)
            except ApiError as error:
                if is_passing(error):
                    raise
                refusals.append((compiler.served.abilities.max_model_len, error))
                continue
            if not line.is_cut:
                return line
            cut = cut or line
        if cut is None:
            raise max(refusals, key=lambda refusal: refusal[0])[1]
        return cut

    def _patiently_compiled(self, compiler: LineCompiler, body: dict[str, Any]) -> CompiledLine:
        """Raises ApiError."""
        for _ in range(MAX_TRIES - 1):
            try:
                return compiler.compile(self._c.endpoint, body)
            except UnavailableError:
                continue
        return compiler.compile(self._c.endpoint, body)

    def _check(self, content: bytes) -> tuple[str, dict[str, Any]]:
        """The line's custom_id and body. Raises LineFault for the first thing that is wrong."""
        line = _parse(content)
        for name in ("custom_id", "method", "url", "body"):
            if line.get(name) is None:
                raise LineFault("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
        custom_id = self._check_custom_id(line["custom_id"])
        if line["method"] != "POST":
            raise LineFault("invalid_method", "The method must be POST.", "method")
        if line["url"] != self._c.endpoint:
            raise LineFault(
                "invalid_url", "The URL provided for this request does not match the batch endpoint.", "url"
            )
        body = line["body"]
        if not isinstance(body, dict):
            raise LineFault("invalid_type", "The body must be an object.", "body")
        self._check_model(body.get("model"))
        prompt_field = _PROMPT_FIELD[self._c.endpoint]
        if body.get(prompt_field) is None:
            raise LineFault("invalid_request", f"{prompt_field.capitalize()} is required.", f"body.{prompt_field}")
        if body.get("stream") is True:
            raise LineFault("streaming_unsupported", "Streaming is not supported in a batch.", "body.stream")
        return custom_id, body

    def _check_custom_id(self, custom_id: object) -> str:
        if not isinstance(custom_id, str):
            raise LineFault("invalid_type", "custom_id must be a string.", "custom_id")
        if not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS or "\0" in custom_id:
            message = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters and no NUL."
            raise LineFault("invalid_value", message, "custom_id")
        if custom_id in self._custom_ids:
            raise LineFault("duplicate_custom_id", "The custom_id stands on an earlier line too.", "custom_id")
        self._custom_ids.add(custom_id)
        return custom_id

    def _check_model(self, model: object) -> None:
        if model is None or model == "":
            raise LineFault("invalid_request", "Model parameter is required.", "body.model")
        if not isinstance(model, str) or model not in self._served.names:
            if self._may_be_foreign and is_model_name(model):
                raise _ForeignModelError(model)
            message = f"The model of this line is not served here; this server serves {self._served.names[0]!r}."
            raise LineFault("model_not_found", message, "body.model")
        self._report.model = self._report.model or model
        if model != self._report.model:
            raise LineFault("model_mismatch", "All requests of a batch must name the same model.", "body.model")

    @property
    def _may_be_foreign(self) -> bool:
        """Whether the whole file may be for another model. True until a line says otherwise."""
        return self._c.others is not None and not self._report.model and not self._report.errors


def _parse(content: bytes) -> dict[str, Any]:
    if len(content) > MAX_BODY_BYTES:
        raise LineFault("invalid_request", f"The line is longer than {MAX_BODY_BYTES} bytes.")
    try:
        line = parse_json(content)
    except InvalidRequestError as error:
        raise LineFault("invalid_json_line", unreadable(content, error), error.param) from None
    if not isinstance(line, dict):
        raise LineFault("invalid_request", "The line is not a JSON object.")
    return line


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def dump_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def refused(line_no: int, error: ApiError) -> LineResult:
    """Result of a line that got an HTTP error.

    Raises:
        ApiError: the same error, if it is temporary; the line has not ended then.
    """
    if is_passing(error):
        raise error
    return LineResult(line_no, LineState.FAILED, error.status, new_request_id(), dump_json(error.body()))
