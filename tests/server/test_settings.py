"""Where a setting's value comes from, and what is refused."""

from pathlib import Path

import pytest

from neaptide.server.settings import Settings, SettingsError, load_settings


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
        ({"NEAPTIDE_DTYPE": "int4"}, "dtype"),
        ({"NEAPTIDE_TTFT_SLO_MS": "-1"}, "ttft_slo_ms"),
        ({"NEAPTIDE_OFFLINE_MAX_KV_RATIO": "1.5"}, "offline_max_kv_ratio"),
        ({"NEAPTIDE_KV_CACHE_GIB": "inf"}, "kv_cache_gib"),
        ({"NEAPTIDE_FILE_RETENTION_DAYS": "0"}, "file_retention_days"),
        ({"NEAPTIDE_REQUEST_LOG_OLD_FILES": "-1"}, "request_log_old_files"),
        ({"NEAPTIDE_CONFIG": "missing.toml"}, "missing.toml"),
    ],
)
def test_bad_values_are_refused_in_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        load_settings({}, environ)
    assert "\n" not in str(refused.value)


def test_unknown_names_in_the_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "neaptide.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(SettingsError, match="prot"):
        load_settings({}, {}, str(file))
