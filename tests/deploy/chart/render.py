"""Renders the chart by Helm's own library, in a process of its own: ``python -m tests.deploy.chart.render``.

Reads a JSON list of values from standard input, and writes what the library says as JSON. The library is Go's, with
threads and signal handlers that no test should share.
"""

import json
import sys
from pathlib import Path
from typing import Any

import helm_python

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "neaptide"
RELEASE, NAMESPACE = "chat", "models"


def rendered(chart: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Manifests by template, or Helm's complaint. As an installation does, it checks the values with the chart's
    own."""
    try:
        chart.validate_schema(chart.merge_values(values))
        return {"manifests": chart.render(values, name=RELEASE, namespace=NAMESPACE)}
    except helm_python.HelmError as error:
        return {"complaint": str(error)}


def main() -> None:
    with helm_python.Chart.load(str(CHART)) as chart:
        answers = [rendered(chart, values) for values in json.load(sys.stdin)]
    json.dump({"answers": answers, "lint": helm_python.lint(str(CHART), strict=True)}, sys.stdout)


if __name__ == "__main__":
    main()
