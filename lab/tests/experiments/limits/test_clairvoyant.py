"""The clairvoyant beside policies, on a small load."""

from neaptide_lab.experiments.limits.clairvoyant import A100, Case, run_cases


def test_no_policy_has_more_in_time_than_the_clairvoyant() -> None:
    light, heavy = run_cases([Case("azure_code_2023", (1133.0, 1136.0), A100, (0.2, 2.0))]).data["cases"].values()
    assert heavy["bound"] < light["bound"] == 1.0
    assert all(0.0 < attained <= one["bound"] for one in (light, heavy) for attained in one["attained"].values())
    assert light["offline_tokens_per_s"] > 0
    assert heavy["offline_tokens_per_s"] is None
