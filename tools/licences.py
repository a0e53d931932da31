"""Prints every installed Python package with its version and licence: ``python tools/licences.py``.

The build of the image runs it in the image's environment. It needs nothing but Python.
"""

from importlib.metadata import Distribution, distributions


def licence_of(package: Distribution) -> str:
    """The licence that a package states: an expression, else its classifiers, else the first line of the old field."""
    stated = package.metadata
    if expression := stated.get("License-Expression"):
        return expression
    classified = [one.rpartition(" :: ")[2] for one in stated.get_all("Classifier", []) if one.startswith("License ::")]
    if classified:
        return ", ".join(sorted(set(classified)))
    return (stated.get("License") or "not stated").strip().splitlines()[0]


def lines() -> list[str]:
    """One line for each package, by name: name, version, licence, and where its licence files are."""
    found = {}
    for package in distributions():
        name = package.metadata["Name"]
        files = [str(path) for path in package.files or () if "licen" in path.name.lower() or path.name == "COPYING"]
        found[name.lower()] = "\n  ".join([f"{name} {package.version}: {licence_of(package)}", *files])
    return [found[name] for name in sorted(found)]


if __name__ == "__main__":
    print("\n".join(lines()))
