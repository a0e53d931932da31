"""Where a setting's value comes from, and what is refused."""

import re
from pathlib import Path

import pytest

from neaptide.cli import build_parser
from neaptide.launch.serve import LaunchError, engine_config, executor_arguments, url_of
from neaptide.server.settings import EXPERT, GROUPS, OPTIONS, Settings, SettingsError, default_text, type_of
from neaptide.server.settings_sources import data_path, load_settings


def test_flags_win_over_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "neaptide.toml"
    file.write_text('port = 1\nhost = "file"\nlog_level = "error"\n')
    environ = {"NEAPTIDE_PORT": "2", "NEAPTIDE_HOST": "environment"}
    settings = load_settings({"port": 3, "host": None}, environ, str(file))
    assert (settings.port, settings.host, settings.log_level) == (3, "environment", "error")


def test_nothing_given_gives_the_defaults() -> None:
    assert load_settings({}, {}) == load_settings({}, {"NEAPTIDE_CONFIG": ""}) == Settings()


def test_lists_are_comma_separated_in_variables() -> None:
    assert load_settings({}, {"NEAPTIDE_API_KEY": "a,b:flex"}).api_key == ("a", "b:flex")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NEAPTIDE_PORT": "x"}, "port"),
        ({"NEAPTIDE_PORT": "70000"}, "port"),
        ({"NEAPTIDE_PORT": "-1"}, "port"),
        ({"NEAPTIDE_MAX_NUM_SEQS": "0"}, "max_num_seqs"),
        ({"NEAPTIDE_KV_CACHE_GIB": "0"}, "kv_cache_gib"),
        ({"NEAPTIDE_HEADER_TIMEOUT_S": "nan"}, "header_timeout_s"),
        ({"NEAPTIDE_DTYPE": "int4"}, "dtype"),
        ({"NEAPTIDE_TTFT_SLO_MS": "-1"}, "ttft_slo_ms"),
        ({"NEAPTIDE_OFFLINE_MAX_KV_RATIO": "1.5"}, "offline_max_kv_ratio"),
        ({"NEAPTIDE_KV_CACHE_GIB": "inf"}, "kv_cache_gib"),
        ({"NEAPTIDE_FILE_RETENTION_DAYS": "0"}, "file_retention_days"),
        ({"NEAPTIDE_REQUEST_LOG_OLD_FILES": "-1"}, "request_log_old_files"),
        ({"NEAPTIDE_PORT": "99999"}, "^port = 99999 is out of range: it must be at least 0 and at most 65,535$"),
        ({"NEAPTIDE_TPOT_SLO_MS": "-5"}, "^tpot_slo_ms = -5.0 is out of range: it must be above 0$"),
        ({"NEAPTIDE_CONFIG": "missing.toml"}, "missing.toml"),
        ({"NEAPTIDE_PORT": "8k"}, "^port = '8k' is not a whole number$"),
        ({"NEAPTIDE_TTFT_SLO_MS": "fast"}, "^ttft_slo_ms = 'fast' is not a number$"),
        ({"NEAPTIDE_BATCH_INVARIANT": "maybe"}, "^batch_invariant = 'maybe' is not true or false$"),
    ],
)
def test_bad_values_are_refused_in_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        load_settings({}, environ)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("8.2k", 8200), ("1.5K", 1536), ("1m", 1_000_000)]
)
def test_tokens_are_counted_with_the_suffixes_of_vllm(text: str, tokens: int) -> None:
    flags = vars(build_parser().parse_args(["serve", "--max-model-len", text, "--max-num-batched-tokens", text]))
    assert (flags["max_model_len"], flags["max_num_batched_tokens"]) == (tokens, tokens)
    assert load_settings({}, {"NEAPTIDE_MAX_MODEL_LEN": text}).max_model_len == tokens


@pytest.mark.parametrize("text", ["8x", "k", "0.0001k", "-1k", "8 k", "8kb"])
def test_what_is_no_whole_number_of_tokens_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match=f"^max_model_len = '{text}' is not a whole number$"):
        load_settings({}, {"NEAPTIDE_MAX_MODEL_LEN": text})
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", f"--max-model-len={text}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument --max-model-len: '{text}' is not a whole number of tokens; see" in line


def test_unknown_names_in_the_file_are_refused_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "neaptide.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(SettingsError, match=r"there is no setting prot, .*neaptide\.toml; the nearest is port$"):
        load_settings({}, {}, str(file))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('api_key = "sk-secret"', "^api_key is not a list of texts$"),
        ("shadow = false", "^shadow is not a text: on or off$"),
        ("port = 8000.5", "^port = 8000.5 is not a whole number$"),
    ],
)
def test_a_value_of_another_kind_is_named_and_a_key_not_shown(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "neaptide.toml"
    file.write_text(line)
    with pytest.raises(SettingsError, match=message):
        load_settings({}, {}, str(file))


def test_a_user_without_a_home_is_asked_for_a_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where the user is none of the system's
    with pytest.raises(SettingsError, match="no home directory; name another with --data-dir"):
        data_path(Settings().data_dir)
    assert data_path("/srv/neaptide") == Path("/srv/neaptide")


def test_an_address_of_ipv6_is_shown_as_clients_write_it() -> None:
    assert url_of("::1", 8000) == "http://[::1]:8000"
    assert url_of("::", 8000) == "http://[::1]:8000"
    assert url_of("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(profile="nonsense"), "no profile 'nonsense'"),
        (Settings(step_log="/no/such/directory/steps.jsonl"), "step_log = '/no/such/directory/steps.jsonl'"),
        (Settings(step_log="/"), "step_log = '/'"),
    ],
)
def test_files_are_looked_for_before_a_model_is_loaded(settings: Settings, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        engine_config(settings, Path("model"), "fingerprint", 8192, Path("data"))


@pytest.mark.parametrize(
    ("mistyped", "nearest"),
    [
        ("NEAPTIDE_API_KEYS", "NEAPTIDE_API_KEY"),
        ("NEAPTIDE_PROT", "NEAPTIDE_PORT"),
        ("NEAPTIDE_MAX_NUM_SEQ", "NEAPTIDE_MAX_NUM_SEQS"),
        ("NEAPTIDE_TTFT_SLO", "NEAPTIDE_TTFT_SLO_MS"),
        ("NEAPTIDE_CONFG", "NEAPTIDE_CONFIG"),
    ],
)
def test_a_mistyped_variable_is_an_error_that_names_the_nearest(mistyped: str, nearest: str) -> None:
    with pytest.raises(SettingsError, match=f"there is no setting {mistyped}, .*; the nearest is {nearest}$"):
        load_settings({}, {mistyped: "1"})


def test_variables_of_others_are_left_alone() -> None:
    environ = {"NEAPTIDE_BASE_URL": "http://x", "NEAPTIDES": "1", "PORT": "1", "neaptide_port": "1"}
    assert load_settings({}, environ) == Settings()


# ---- flags -----------------------------------------------------------------------------------------------

VALUES: dict[type, tuple[str, object]] = {
    int: ("7", 7),
    float: ("0.5", 0.5),
    str: ("text", "text"),
    tuple: ("a", ["a"]),
    bool: ("", True),
}


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_every_setting_has_a_flag_of_its_type(name: str) -> None:
    option = OPTIONS[name]
    text, value = (option.choices[-1], option.choices[-1]) if option.choices else VALUES[type_of(name)]
    flag = [] if name == "model" else [f"--{name.replace('_', '-')}"]
    words = [text] if text else []  # a switch takes none
    parsed = vars(build_parser().parse_args(["serve", *flag, *words]))
    assert (list(parsed[name]) if type_of(name) is tuple else parsed[name]) == value
    given = {key: value for key, value in parsed.items() if value is not None}
    assert given.keys() == {"func", name}


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_help_says_what_a_setting_is_and_its_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    default = default_text(name)
    # Lines break at hyphens too, so blanks say nothing.
    said = f"{OPTIONS[name].help} ({default})" if default else OPTIONS[name].help
    assert said.replace(" ", "") in shown.replace(" ", "")


def test_the_short_help_leaves_out_what_is_for_experts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    shown = set(re.findall(r"^ +--([a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    flags = {name.replace("_", "-") for group, names in GROUPS.items() if group != EXPERT for name in names}
    assert shown - {"help-all", "config"} == flags - {"model"}


def test_every_setting_belongs_to_one_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(Settings.__struct_fields__)


def test_lists_are_divided_by_commas_but_keys_are_repeated() -> None:
    args = ["serve", "--allowed-hosts", "a,b", "--api-key", "a,b", "--api-key", "c:flex"]
    parsed = build_parser().parse_args(args)
    assert (parsed.allowed_hosts, parsed.api_key) == (("a", "b"), ["a,b", "c:flex"])


def test_an_executor_that_does_not_exist_is_refused_at_launch(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="executor = 'tprch' is not supported"):
        engine_config(Settings(executor="tprch"), tmp_path, "", 512, tmp_path)


def test_arguments_of_an_executor_are_taken_apart_by_name() -> None:
    assert executor_arguments(["tensor-parallel-size=2", "--x=a=b", "y="]) == {
        "tensor_parallel_size": "2",
        "x": "a=b",
        "y": "",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["fp8"], "not of the form NAME=VALUE"),
        (["=2"], "not of the form"),
        (["a-b=1", "a_b=2"], "a_b is given twice"),
    ],
)
def test_arguments_of_an_executor_that_make_no_sense_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        executor_arguments(given)


def test_an_executor_without_arguments_refuses_them(tmp_path: Path) -> None:
    settings = Settings(executor="sim", executor_arg=("a=1",))
    with pytest.raises(LaunchError, match=r"^executor = 'sim' takes no arguments, but got a$"):
        engine_config(settings, tmp_path, "", 100, tmp_path)


@pytest.mark.parametrize(
    ("environ", "is_invariant"),
    [({}, False), ({"NEAPTIDE_BATCH_INVARIANT": "true"}, True), ({"NEAPTIDE_BATCH_INVARIANT": "0"}, False)],
)
def test_a_switch_reaches_the_engine(environ: dict[str, str], is_invariant: bool, tmp_path: Path) -> None:
    settings = load_settings({"batch_invariant": None}, environ)
    assert engine_config(settings, tmp_path, "", 512, tmp_path).executor.batch_invariant is is_invariant


def test_batch_invariance_by_another_executor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="executor = 'vllm' does not support batch_invariant"):
        engine_config(Settings(executor="vllm", batch_invariant=True), tmp_path, "", 512, tmp_path)
