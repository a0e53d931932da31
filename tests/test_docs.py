"""The documents say what is there."""

import ast
import json
import re
from pathlib import Path

import pytest

from neaptide import __version__
from neaptide.cli import build_parser
from neaptide.server.openai.schemas import ChatBody, CompletionBody
from tests.acceptance import ROWS, load_ratchet
from tests.deploy.test_deploy import all_series
from tools import live_page, settings_page
from tools.syntax import syntax_tree

REPOSITORY = Path(__file__).parents[1]


def pages() -> list[Path]:
    """The pages at the root, of docs, of the examples and of the notebook."""
    below = [page for folder in ("docs", "examples", "lab/notebook") for page in (REPOSITORY / folder).rglob("*.md")]
    return sorted([*REPOSITORY.glob("*.md"), *below])


def text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_the_page_of_settings_is_what_the_settings_say() -> None:
    assert text("docs/settings.md") == settings_page.page()


def test_readmes_figures_are_those_of_the_line_of_the_live_run() -> None:
    assert live_page.paragraph(json.loads(text("docs/live.json"))) in text("README.md")


def test_every_metric_is_documented() -> None:
    documented = text("docs/metrics.md")
    expanded = set(re.findall(r"neaptide_\w+", documented))
    expanded |= {f"neaptide_request_{name}_seconds" for name in ("ttft", "tpot", "itl", "e2e", "queue")}
    families = {family.name for family in all_series().collect()}
    missing = {name for name in families if name not in expanded and f"{name}_total" not in expanded}
    assert not missing


@pytest.mark.parametrize("name", sorted({**ChatBody.model_fields, **CompletionBody.model_fields}))
def test_every_request_field_is_documented(name: str) -> None:
    assert f"`{name}`" in text("docs/api.md") + text("docs/openai-parity.md")


def test_readmes_commands_exist() -> None:
    readme = text("README.md")
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", readme)) <= targets
    help_text = build_parser().format_help()
    for command in ("serve", "demo", "batch"):
        assert command in help_text


def test_links_in_documents_lead_somewhere() -> None:
    for document in pages():
        for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_file_that_contributors_are_sent_to_exists() -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:toml|yaml|md))`", text("CONTRIBUTING.md"))
    assert len(named) > 15
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_every_file_that_a_page_names_exists() -> None:
    """Paths from the repository, from the package or from the page; a file without a folder may be anywhere."""
    folders = [REPOSITORY / name for name in ("neaptide", "tests", "lab", "tools", "benchmarks", "deploy", "examples")]
    names = {path.name for folder in folders for path in folder.rglob("*.*")}
    checked, missing = 0, []
    for page in [*pages_but_the_notebooks(), REPOSITORY / "lab/README.md"]:
        places = (REPOSITORY, REPOSITORY / "neaptide", page.parent)
        for path in paths_in(page.read_text(encoding="utf-8")):
            checked += 1
            if path not in names and not any((place / path).exists() for place in places):
                missing.append(f"{page.relative_to(REPOSITORY)}: {path}")
    assert checked > 300
    assert missing == []


def pages_but_the_notebooks() -> list[Path]:
    """The notebook says what was true on a day."""
    return [page for page in pages() if "notebook" not in page.parts]


def paths_in(page: str) -> list[str]:
    """Words in backticks that are paths: of a source file, or below a folder of the repository."""
    words = re.findall(r"(?<![\w/.$<:-])[\w.-]+(?:/[\w.-]+)*/?", " ".join(re.findall(r"`([^`\n]+)`", page)))
    below = r"(?:neaptide|tests|lab|tools|docs|benchmarks|deploy|examples|experiments)/\w"
    return [word for word in words if word.endswith((".py", ".md", ".toml")) or re.match(below, word)]


def test_every_target_that_contributors_are_told_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", text("CONTRIBUTING.md"))) <= targets


def test_the_release_is_the_first_in_the_changelog() -> None:
    (newest, *_) = re.findall(r"^## ([\d.]+)", text("CHANGELOG.md"), re.MULTILINE)
    assert newest == __version__


@pytest.mark.parametrize("name", ["README.md", "docs/operations.md", "docs/quickstart.md", "docs/keys.md"])
def test_no_paragraph_of_the_first_pages_is_a_wall(name: str) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", (REPOSITORY / name).read_text())
    paragraphs = re.split(r"\n\n|\n- |\n\d\. ", text)
    prose = [text for text in paragraphs if not text.lstrip().startswith(("|", "#"))]
    assert [text[:60] for text in prose if len(text.split()) > 80] == []
    sentences = re.split(r"[.:?]\s+", " ".join(prose))
    assert [text[:60] for text in sentences if len(text.split()) > 45] == []


def test_a_curl_that_sends_a_body_says_what_it_is() -> None:
    """Without it the server refuses: so a page of another site could not send it either."""
    found = []
    for document in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        joined = document.read_text(encoding="utf-8").replace("\\\n", "")
        found += re.findall(r"^.*\bcurl\b.* -d .*$", joined, re.MULTILINE)
    assert len(found) >= 4
    assert [line for line in found if "-H 'Content-Type: application/json'" not in line] == []


def test_every_message_of_the_troubleshooting_tables_is_in_the_code() -> None:
    tables = text("docs/operations.md").partition("\n## Troubleshooting")[2].partition("\n## ")[0]
    messages = [row for row in re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE) if row != "message"]
    assert len(messages) > 40
    said = messages_in_code()
    fixed = {message: [part for part in message.split("...") if part.strip()] for message in messages}
    assert [message for message, parts in fixed.items() if not any(in_order(parts, text) for text in said)] == []


def messages_in_code() -> list[str]:
    """The texts of the package, with a line feed for what is put in."""
    trees = [syntax_tree(path.read_text(encoding="utf-8")) for path in (REPOSITORY / "neaptide").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    whole = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    parts = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    joined = ["".join(str(p.value) if isinstance(p, ast.Constant) else "\n" for p in values) for values in parts]
    return [*whole, *joined]


def in_order(parts: list[str], text: str) -> bool:
    """Whether the text has the parts, one behind the other."""
    return re.search(".*".join(map(re.escape, parts)), text, re.DOTALL) is not None


@pytest.mark.parametrize("name", ["docs/promises.md", "docs/security.md"])
def test_every_test_that_a_document_names_exists(name: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text(name))
    assert len(named) >= 15
    missing = {f"{path}::{function}" for path, function in named if function not in functions_of(path)}
    assert not missing


@pytest.mark.parametrize("name", ["docs/promises.md", "docs/security.md"])
def test_every_line_of_a_table_of_promises_names_its_test(name: str) -> None:
    for table in re.split(r"\n{2,}", text(name)):
        if table.startswith(("| a client may rely on |", "| what | how |")):
            for row in table.splitlines()[2:]:
                assert re.search(r"`tests/[\w/]+\.py::\w+` \|$", row), row


def functions_of(path: str) -> set[str]:
    file = REPOSITORY / path
    tree = syntax_tree(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_of_the_acceptance_table_holds_or_is_a_known_gap() -> None:
    lines = [line for line in text("lab/notebook/acceptance.md").splitlines() if line.startswith("| A")]
    outcomes = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in lines}
    gaps = load_ratchet()
    assert outcomes.keys() == ROWS.keys()
    assert gaps.keys() <= ROWS.keys()
    for row, outcome in outcomes.items():
        assert outcome == "holds" or (row in gaps and gaps[row] in outcome), row


def test_the_map_names_every_folder_and_no_file_that_is_not_there() -> None:
    page, package = text("docs/architecture.md"), REPOSITORY / "neaptide"
    folders = {path.parent.relative_to(package) for path in package.rglob("*.py")} - {Path()}
    unnamed = {str(folder) for folder in folders if f"`{folder}/`" not in page and f"`{folder.name}/`" not in page}
    assert unnamed <= {"server/batches/storing/migrations", "server/batches/storing/migrations/versions"}
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page)
    assert len(named) > 5
    assert all((package / name).exists() for name in named)
