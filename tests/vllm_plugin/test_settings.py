"""Settings of files and batches inside vLLM."""

from pathlib import Path

import pytest

from neaptide.server.http.auth import principal_for
from neaptide_vllm.batches.settings import batch_settings, key_weights


def test_what_is_set_is_used() -> None:
    settings = batch_settings(
        {
            "NEAPTIDE_DATA_DIR": "/data",
            "NEAPTIDE_COMPLETION_WINDOWS": "24h,1h30m",
            "NEAPTIDE_FILE_RETENTION_DAYS": "0.5",
        }
    )
    assert (settings.data_dir, settings.completion_windows, settings.file_life_s) == (
        Path("/data"),
        ("24h", "1h30m"),
        43_200,
    )


def test_nothing_needs_to_be_set() -> None:
    settings = batch_settings({"NEAPTIDE_DATA_DIR": ""})
    assert settings.data_dir == Path("~/.local/share/neaptide-vllm").expanduser()
    assert (settings.completion_windows, settings.file_life_s) == (("24h",), 30 * 86_400)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NEAPTIDE_COMPLETION_WINDOWS", "soon"),
        ("NEAPTIDE_FILE_RETENTION_DAYS", "soon"),
        ("NEAPTIDE_FILE_RETENTION_DAYS", "0"),
        ("NEAPTIDE_FILE_RETENTION_DAYS", "nan"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_by_the_name_of_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        batch_settings({name: value})


def test_weights_of_keys_are_by_share() -> None:
    found = key_weights({"NEAPTIDE_KEY_WEIGHTS": "one:x2, two:x0.5,three"})
    assert found == {principal_for("one").share: 2.0, principal_for("two").share: 0.5}
    assert key_weights({}) == {}


@pytest.mark.parametrize("value", ["secret:x0", "secret:y2", "secret:batch", "secret:admin:x2", ":x2"])
def test_a_weight_that_cannot_be_is_refused_without_its_key(value: str) -> None:
    with pytest.raises(ValueError, match=r"^NEAPTIDE_KEY_WEIGHTS: ") as refused:
        key_weights({"NEAPTIDE_KEY_WEIGHTS": value})
    assert "secret" not in str(refused.value)
