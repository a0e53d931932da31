"""Counts what a single server loads: the modules of all of its processes, and their lines.

    python -m tools.serving_closure

A module counts if one of the server's processes may import it, at its start or later. Prints a table by package, then
one line of JSON.
"""

import json
from collections import Counter
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).parents[1]
PROCESSES = (
    "neaptide.launch.serve",
    "neaptide.launch.planner",
    "neaptide.launch.simulating",
    "neaptide.server.batches.checking.worker",
    "neaptide.server.structured.child",
    "neaptide.engine.process.tied",
)
"""Main modules of the server's processes: the API and the engine (one module), and the children."""
NAMED = ("neaptide.executors.torch.start", "neaptide.executors.torch.models")
"""Modules that are imported by name: the executor, and the families of models."""


def serving_closure() -> dict[str, int]:
    """Lines of each module that a single server may load."""
    graph = grimp.build_graph("neaptide", exclude_type_checking_imports=True, cache_dir=None)
    named = [module for module in graph.modules if module.startswith(NAMED)]
    found = {*PROCESSES, *named}
    found = found.union(*(graph.find_upstream_modules(module) for module in found))
    packages = {module.rsplit(".", number)[0] for module in found for number in range(1, module.count(".") + 1)}
    return {module: lines_of(module) for module in sorted(found | packages)}


def lines_of(module: str) -> int:
    path = REPOSITORY / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return len(file.read_text(encoding="utf-8").splitlines())


def main() -> None:
    found = serving_closure()
    modules, lines = Counter[str](), Counter[str]()
    for module, count in found.items():
        package = ".".join(module.split(".")[:2])
        modules[package] += 1
        lines[package] += count
    for package in sorted(modules, key=lambda one: -lines[one]):
        print(f"{package:<24}{modules[package]:>6} modules{lines[package]:>8} lines")
    print(json.dumps({"modules": len(found), "lines": sum(found.values())}))


if __name__ == "__main__":
    main()
