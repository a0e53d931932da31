"""What vLLM finds in its environment."""

import os

import pytest

from neaptide.executors.vllm.environment import PROMISED, set_environment


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})


def test_what_is_promised_rests_on_no_setting_of_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    os.environ |= {"VLLM_COMPUTE_NANS_IN_LOGITS": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    set_environment(0)
    assert {name: os.environ[name] for name in PROMISED} == PROMISED
    assert [record.message for record in caplog.records] == [
        "VLLM_COMPUTE_NANS_IN_LOGITS is set to 1; the environment's value is ignored"
    ]


def test_other_settings_of_the_operator_stay() -> None:
    os.environ["VLLM_CONFIGURE_LOGGING"] = "1"
    set_environment(0)
    assert os.environ["VLLM_CONFIGURE_LOGGING"] == "1"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ


def test_threads_of_the_operator_stay_and_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    os.environ["OMP_NUM_THREADS"] = "3"
    set_environment(2)
    set_environment(3)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert [record.message for record in caplog.records] == ["OMP_NUM_THREADS=3 overrides num_threads = 2"]
