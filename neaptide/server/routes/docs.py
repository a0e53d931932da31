"""Route ``GET /docs``: the contents of ``/openapi.json`` as a page for people.

It needs no script and nothing from another server, so it works on a machine without internet access.
"""

import re
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

router = APIRouter()

_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;overflow-wrap:anywhere}"
_STYLE += "table{border-collapse:collapse}td{padding:0 1em 0 0;vertical-align:top}td:first-child{min-width:7em}"
_STYLE += "code{font-size:14px}h2 code{font-size:17px}:root{color-scheme:light dark;background:Canvas;color:CanvasText}"
_HEAD = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Every operation with its parameters, its body and its replies."""
    return HTMLResponse(_page(request.app.openapi()), headers=_HEADERS)


def _page(document: dict[str, Any]) -> str:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    found = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    index = "".join(f'<li><a href="#{escape(name)}"><code>{escape(name)}</code></a>' for name, _ in found)
    operations = [_operation(name, operation) for name, operation in found]
    schemas = [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return (
        f'<!doctype html><html lang="en">{_HEAD}<title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>The whole document, for tools: <a href="openapi.json">openapi.json</a></p>'
        f"<ul>{index}</ul>{''.join(operations)}<h2>Schemas</h2>{''.join(schemas)}</html>"
    )


def _operation(name: str, operation: dict[str, Any]) -> str:
    rows = [
        ("parameter", f"<code>{escape(parameter['name'])}</code> in {escape(parameter['in'])}")
        for parameter in operation.get("parameters", [])
    ]
    rows += [("body", _content(operation["requestBody"]))] if "requestBody" in operation else []
    errors: dict[str, list[str]] = {}
    """Statuses of errors by the kind of their reply: nearly all have one kind."""
    for status, reply in sorted(operation["responses"].items()):
        if status.startswith(("4", "5")):
            errors.setdefault(_content(reply), []).append(status)
        else:
            rows.append((status, f"{_text(reply['description'])} {_content(reply)}"))
    rows += [("errors", f"{', '.join(statuses)}: {content}") for content, statuses in errors.items()]
    heading = f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>'
    return f"{heading}<p>{_text(operation.get('description', ''))}</p>{_table(rows)}"


def _text(marked: str) -> str:
    """A description, with names in backquotes as code."""
    return re.sub("`+([^`]+)`+", r"<code>\1</code>", escape(marked))


def _content(holder: dict[str, Any]) -> str:
    described = (
        f"{escape(media_type)}: {_type(content.get('schema') or content.get('itemSchema') or {})}"
        for media_type, content in holder.get("content", {}).items()
    )
    return "; ".join(described)


def _schema(name: str, schema: dict[str, Any]) -> str:
    rows = [(f"<code>{escape(field)}</code>", _type(kind)) for field, kind in schema.get("properties", {}).items()]
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{_text(schema.get("description", ""))}</p>{_table(rows)}'


def _type(schema: dict[str, Any]) -> str:
    """A type in few words; a named one links to its fields."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(choice) for choice in schema[key])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))


def _table(rows: list[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><td>{left}<td>{right}" for left, right in rows) + "</table>"
