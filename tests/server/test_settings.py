"""Where a setting's value comes from, and what is refused."""

from pathlib import Path

import pytest

from neaptide.cli import build_parser
from neaptide.launch.serve import LaunchError, engine_config, executor_arguments
from neaptide.server.settings import OPTIONS, Settings, SettingsError, default_text, type_of
from neaptide.server.settings_sources import load_settings


def test_flags_win_over_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "neaptide.toml"
    file.write_text('port = 1\nhost = "file"\nlog_level = "error"\n')
    environ = {"NEAPTIDE_PORT": "2", "NEAPTIDE_HOST": "environment"}
    settings = load_settings({"port": 3, "host": None}, environ, str(file))
    assert (settings.port, settings.host, settings.log_level) == (3, "environment", "error")


def test_nothing_given_gives_the_defaults() -> None:
    assert load_settings({}, {}) == Settings()


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
    ],
)
def test_bad_values_are_refused_in_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        load_settings({}, environ)
    assert "\n" not in str(refused.value)


def test_unknown_names_in_the_file_are_refused_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "neaptide.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(SettingsError, match=r"there is no setting prot, .*neaptide\.toml; the nearest is port$"):
        load_settings({}, {}, str(file))


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
        build_parser().parse_args(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    default = default_text(name)
    # Lines break at hyphens too, so blanks say nothing.
    said = f"{OPTIONS[name].help} ({default})" if default else OPTIONS[name].help
    assert said.replace(" ", "") in shown.replace(" ", "")


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
    with pytest.raises(LaunchError, match=r"^executor = 'sim' takes no arguments; a was given$"):
        engine_config(settings, tmp_path, "", 100, tmp_path)


@pytest.mark.parametrize(
    ("environ", "is_invariant"),
    [({}, False), ({"NEAPTIDE_BATCH_INVARIANT": "true"}, True), ({"NEAPTIDE_BATCH_INVARIANT": "0"}, False)],
)
def test_a_switch_reaches_the_engine(environ: dict[str, str], is_invariant: bool, tmp_path: Path) -> None:
    settings = load_settings({"batch_invariant": None}, environ)
    assert engine_config(settings, tmp_path, "", 512, tmp_path).executor.batch_invariant is is_invariant


def test_batch_invariance_by_another_executor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="executor = 'vllm' has no batch_invariant"):
        engine_config(Settings(executor="vllm", batch_invariant=True), tmp_path, "", 512, tmp_path)
