"""Writes ``docs/settings.md`` from the fields of ``Settings``: ``python -m tools.settings_page``. A test checks the
page."""

from collections.abc import Sequence
from pathlib import Path

from neaptide.server.settings import GROUPS, OPTIONS, Option, default_text

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

```sh
neaptide serve --help-all                              # every setting
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
TABLE = "| setting | default | meaning |\n|---|---|---|\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(group, names) for group, names in GROUPS.items())


def _section(group: str, names: Sequence[str]) -> str:
    return f"\n## {group.capitalize()}\n\n{TABLE}" + "".join(_row(name, OPTIONS[name]) for name in names)


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
