"""Writes ``docs/settings.md`` from the fields of ``Settings``: ``python -m tools.settings_page``. A test checks the
page."""

from pathlib import Path

from neaptide.server.settings import OPTIONS, Option, default_text

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Written by `python -m tools.settings_page` from the fields of `Settings`; not edited by hand.

A flag wins over an environment variable, that over the TOML file (`--config FILE` or `NEAPTIDE_CONFIG`). The flag of
`data_dir` is `--data-dir`, its variable `NEAPTIDE_DATA_DIR`, its TOML key `data_dir`; `model` is an argument. Lists are
comma-separated in flags and variables; `--api-key` is repeated instead. A variable `NEAPTIDE_...` that is no setting is
an error that names the nearest one (in Kubernetes, a service of the name `neaptide` makes such variables: set
`enableServiceLinks: false`).

Client commands (`neaptide batch`) talk to `--base-url`, or `NEAPTIDE_BASE_URL`, with or without `/v1`. Their key is
`--api-key-file`'s content, `--api-key`, or `NEAPTIDE_API_KEY`; where that lists a server's keys, the first, without its
marks.

| setting | default | meaning |
|---|---|---|
"""
TAIL = """
`max_model_len` may not exceed what the KV cache holds: the server says so at start. Per request, `ttft_slo_ms` and
`tpot_slo_ms` in the body override the targets. `sim_step_ms` is for tests.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_row(name, option) for name, option in OPTIONS.items()) + TAIL


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
