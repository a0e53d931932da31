"""Writes ``docs/settings.md`` from the fields of ``Settings``: ``python -m tools.settings_page``. A test compares."""

from pathlib import Path

from neaptide.server.settings import OPTIONS, Option, default_text

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

```sh
neaptide serve --help                                  # every setting
neaptide serve my-model --ttft-slo-ms 500              # a flag
NEAPTIDE_TTFT_SLO_MS=500 neaptide serve my-model       # an environment variable
neaptide serve my-model --config server.toml           # a TOML file: ttft_slo_ms = 500
```

`python -m tools.settings_page` generates this page from `neaptide/server/settings.py`. Do not edit it by hand.

- **Order.** A flag overrides an environment variable, and that overrides the TOML file (`--config FILE` or
  `NEAPTIDE_CONFIG`).
- **Names.** The setting `data_dir` is the flag `--data-dir`, the variable `NEAPTIDE_DATA_DIR` and the TOML key
  `data_dir`. Only `model` is an argument without a flag.
- **Lists.** Flags and variables separate entries by commas. `--api-key` and `--executor-arg` are repeated instead.
- **Mistakes.** An unknown name is an error that names the nearest setting. Kubernetes creates `NEAPTIDE_...` variables
  if a service has the name `neaptide`: set `enableServiceLinks: false`.
- **Clients.** `neaptide batch` and `neaptide loadgen` read the server's address from `NEAPTIDE_BASE_URL` and the key
  from `NEAPTIDE_API_KEY`. If that variable lists several keys, they send the first one.
"""
GROUPS = {
    "Model": "model served_model_name device dtype quantization batch_invariant max_model_len",
    "Network and access": "host port api_key allowed_hosts cors_origins max_connections",
    "Latency targets and load": "ttft_slo_ms tpot_slo_ms max_online_requests max_offline_requests policy profile",
    "Batches and files": "data_dir completion_windows file_retention_days offline_max_kv_ratio offline_plan "
    "give_up_steps store blobs chunk_lease_s",
    "Memory and steps": "kv_cache_gib host_cache_gib block_size max_num_seqs max_num_batched_tokens",
    "Computing": "num_threads cpu_kernels gpu_kernels executor executor_arg engine_python sim_step_ms",
    "Time limits": "header_timeout_s body_timeout_s send_timeout_s engine_timeout_s drain_timeout_s",
    "Logs and metrics": "log_level log_format metrics_compat shadow step_log step_log_max_mb request_log_max_mb "
    "request_log_old_files",
}
REST = "Others"
"""Heading of the settings that no group names."""
TABLE = "| setting | default | meaning |\n|---|---|---|\n"


def page() -> str:
    """The whole page."""
    groups = {heading: names.split() for heading, names in GROUPS.items()}
    rest = OPTIONS.keys() - {name for names in groups.values() for name in names}
    if rest:
        groups[REST] = sorted(rest)
    return HEAD + "".join(_section(heading, names) for heading, names in groups.items())


def _section(heading: str, names: list[str]) -> str:
    return f"\n## {heading}\n\n{TABLE}" + "".join(_row(name, OPTIONS[name]) for name in names)


def _row(name: str, option: Option) -> str:
    default = default_text(name)
    meaning = option.help
    if option.choices:
        meaning += f" One of {', '.join(f'`{choice}`' for choice in option.choices)}."
    if option.page is not None:
        meaning += f" See [{option.page}]({option.page}.md)."
    return f"| `{name}` | {f'`{default}`' if default else ''} | {meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
