"""Client of the commands that talk to a running server: its address, the key, errors in one line."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from neaptide.commands.outputs import add_server
from neaptide.loadgen.client.proxies import blocking_mounts_for
from neaptide.server.client_variables import client_api_key, sendable


class CommandError(Exception):
    """An error as one line for the user."""


def add_client(parser: argparse.ArgumentParser, base_url: str) -> None:
    """Adds the flags of a client: server and key. ``base_url`` is the default server."""
    add_server(parser, base_url)
    add_key(parser)


def add_key(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the key to send."""
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--api-key-file", metavar="FILE", type=Path, help="file with the key to send")
    keys.add_argument("--api-key", metavar="KEY", help="the key itself; other users of the machine can see it")


def open_client(args: argparse.Namespace) -> httpx.Client:
    """A client of the server, with its key. Raises CommandError for a key that cannot be sent."""
    key = _key(args)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # OpenAI clients need /v1 in the URL; ours accepts it.
    base_url = args.server.rstrip("/").removesuffix("/v1")
    return httpx.Client(
        base_url=base_url,
        headers=headers,
        timeout=httpx.Timeout(30.0, read=600.0),
        mounts=blocking_mounts_for(base_url),
    )


def _key(args: argparse.Namespace) -> str | None:
    """The key from the flag, its file, or the environment."""
    key: str | None = args.api_key
    if args.api_key_file is not None:
        key = args.api_key_file.read_text(encoding="utf-8", errors="replace").strip()
    elif key is None:
        key = client_api_key()
    source = args.api_key_file or ("--api-key" if args.api_key is not None else "NEAPTIDE_API_KEY")
    try:
        return None if key is None else sendable(key, str(source))
    except ValueError as error:
        raise CommandError(str(error)) from None


def run_client(command: str, run: Callable[[httpx.Client, argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command against the server of its arguments; errors are one line. Returns the exit status."""
    try:
        with open_client(args) as client:
            return run(client, args)
    except CommandError as error:
        message = str(error)
    except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        message = f"cannot reach a server at {args.server}: {error}"
    except httpx.HTTPError as error:
        message = f"the exchange with {args.server} failed: {error or type(error).__name__}"
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"{error.filename or 'the output'}: {error.strerror}"
    print(f"neaptide {command}: {message}", file=sys.stderr)
    return 1


def call(client: httpx.Client, method: str, url: str, **arguments: Any) -> dict[str, Any]:
    """The server's answer, a JSON object. Raises CommandError."""
    response = client.request(method, url, **arguments)
    if not response.is_success:
        raise CommandError(error_text(response))
    try:
        answer: dict[str, Any] = response.json()
    except ValueError:
        message = f"{response.url} does not answer like an OpenAI server: the answer is not JSON"
        raise CommandError(message) from None
    return answer


def error_text(response: httpx.Response) -> str:
    """The server's own words for an error."""
    is_batch = response.status_code == 404 and "/batches/" in response.request.url.path
    advice = "; list batches with: neaptide batch list" if is_batch else ""
    try:
        return f"{response.json()['error']['message']} (HTTP {response.status_code}){advice}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered HTTP {response.status_code}"
