"""The part of kustomize that deploy/kubernetes uses: resources, replicas, and patches that are merged by name.

It refuses what it does not know, so that a kustomization that needs more makes a test fail and not pass by chance.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "resources", "replicas", "patches"}


def build(folder: Path) -> list[Manifest]:
    """All manifests of a kustomization, patched."""
    told = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert told["kind"] == "Kustomization"
    assert set(told) <= _KNOWN, folder
    found: list[Manifest] = []
    for name in told["resources"]:
        path = (folder / name).resolve()
        found += build(path) if path.is_dir() else load(path)
    for entry in told.get("replicas", []):
        find(found, "Deployment", entry["name"])["spec"]["replicas"] = entry["count"]
    for entry in told.get("patches", []):
        assert set(entry) == {"path"}
        (patch,) = load(folder / entry["path"])
        target = find(found, patch["kind"], patch["metadata"]["name"])
        found[found.index(target)] = merge(target, patch)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in found]
    assert len(names) == len(set(names)), f"{folder} has a manifest twice"
    return found


def load(path: Path) -> list[Manifest]:
    """The documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one of that name."""
    (found,) = [entry for entry in manifests if (entry["kind"], entry["metadata"]["name"]) == (kind, name)]
    return found


def merge(base: Any, patch: Any) -> Any:
    """A strategic merge: mappings by key, lists of named things by name, anything else is replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = copy.deepcopy(base)
        for key, value in patch.items():
            merged[key] = merge(merged[key], value) if key in merged else copy.deepcopy(value)
        return merged
    if _is_named(base) and _is_named(patch):
        known = {entry["name"]: entry for entry in patch}
        kept = [merge(entry, known.pop(entry["name"], {})) for entry in base]
        return [entry for entry in patch if entry["name"] in known] + kept
    return copy.deepcopy(patch)


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) and "name" in entry for entry in value)
