"""What a start finds out before it serves."""

import json
import logging
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neaptide.launch.serve import (
    LaunchError,
    WrongValueError,
    embedded_model_path,
    keep_kernels,
    listen,
    listen_too,
    model_context,
    serve,
)
from neaptide.server.settings import Settings

OTHER_PORT = "choose another with --port, 0 takes a free one"


def test_of_two_starts_on_one_port_the_later_one_is_told() -> None:
    host = "127.0.0.1"
    with listen(host, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(LaunchError) as refused:
            listen(host, port)
    assert str(refused.value) == f"cannot listen on {host}:{port}: Address already in use; {OTHER_PORT}"


def test_only_processes_of_one_server_share_a_port() -> None:
    host = "127.0.0.1"
    with listen(host, 0, is_shared=True) as first:
        port = first.getsockname()[1]
        with listen_too(host, port) as second:
            assert second.getsockname() == first.getsockname()
        for is_shared in (False, True):
            with pytest.raises(LaunchError, match="Address already in use"):
                listen(host, port, is_shared=is_shared)


def test_a_server_of_a_cluster_has_one_api_process() -> None:
    with socket.socket() as listener, pytest.raises(WrongValueError, match=r"^api_processes is for neaptide serve"):
        serve(Settings(api_processes=2), listener)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The embedded model without its weights: nobody reads them here."""
    directory = tmp_path / "model"
    shutil.copytree(embedded_model_path(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    return directory


def change(model: Path, file: str, **changes: Any) -> None:
    path = model / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def use_template(model: Path, template: object) -> None:
    (model / "chat_template.jinja").unlink()
    change(model, "tokenizer_config.json", chat_template=template)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda model: (model / "tokenizer.json").unlink(), "^tokenizer.json is missing in .*; save_pretrained of "),
        (lambda model: (model / "tokenizer.json").write_text("[]"), "^tokenizer.json cannot be used: invalid type"),
        (lambda model: (model / "tokenizer_config.json").write_text("{"), "^tokenizer_config.json cannot be read: "),
        (lambda model: use_template(model, "{% if %}"), "^the model's chat template cannot be used: Expected an "),
        (lambda model: use_template(model, {"a": "b"}), "^the chat template of tokenizer_config.json is neither"),
        (lambda model: (model / "config.json").write_text("[" * 100_000), "^config.json cannot be read: "),
        (lambda model: change(model, "config.json", rope_scaling="x"), "^config.json: rope_scaling must be an object"),
        (lambda model: change(model, "config.json", quantization_config="fp8"), "^config.json: quantization_config mu"),
        (lambda model: change(model, "generation_config.json", eos_token_id=True), "^eos_token_id True is not a token"),
    ],
)
def test_a_model_directory_that_cannot_be_used_is_told_in_one_line(
    model: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(model)
    with pytest.raises(LaunchError, match=words) as refused:
        model_context(Settings(model=str(model)), model / "data")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("template", [[], ["x"], [{"name": "default"}], [{"name": 5, "template": "{{ x }}"}], None])
def test_a_model_without_a_chat_template_is_served(model: Path, template: object) -> None:
    use_template(model, template)
    context, _ = model_context(Settings(model=str(model)), model / "data")
    assert context.tokenizer.facts == {}


def test_what_an_operator_is_told_has_no_control_characters(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as refused:
        model_context(Settings(model="/no\nsuch\x1b[2Jmodel"), tmp_path)
    assert str(refused.value) == r"/no such\u001b[2Jmodel: no such directory"


def test_ends_that_the_model_cannot_say_are_left_out(model: Path) -> None:
    change(model, "generation_config.json", eos_token_id=[7, 5, 7, -1, 416, 999_999])
    context, config = model_context(Settings(model=str(model)), model / "data")
    assert context.vocab_size == 416
    assert context.eos_token_ids == config.executor.eos_token_ids == (7, 5)


def test_a_length_above_the_models_own_is_cut_and_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        context, config = model_context(Settings(model=str(model), max_model_len=8193), model / "data")
    assert context.max_model_len == config.scheduler.max_model_len == 8192
    (record,) = caplog.records
    assert record.message.startswith("max_model_len = 8193 is above the 8192 tokens (prompt + output)")
    caplog.clear()
    model_context(Settings(model=str(model), max_model_len=8192), model / "data")
    assert not caplog.records


@pytest.mark.parametrize("home", ["there is none", "it cannot be written", "it can be written"])
def test_kernels_are_kept_in_the_data_directory_of_a_user_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """As in a container that runs as any user, or with a read-only root."""
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if home == "there is none":
        monkeypatch.setattr(Path, "home", unknown)
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: home == "it can be written")
    keep_kernels(tmp_path)
    kept = {name: os.environ.get(name) for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR")}
    if home == "it can be written":
        assert kept == {"XDG_CACHE_HOME": None, "TRITON_CACHE_DIR": None}
    else:
        assert kept == {
            "XDG_CACHE_HOME": str(tmp_path / "kernels"),
            "TRITON_CACHE_DIR": str(tmp_path / "kernels" / "triton"),
        }
