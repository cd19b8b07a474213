"""The published configs, from their tables."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf

HERE = Path(__file__).parent
PARENTS = {
    "super3_rlhf": "super3_rlvr",
    "super3_swe1": "super3_rlvr",
    "super3_swe2": "super3_rlvr",
    "super3_rlvr_small": "super3_rlvr",
    "super3_rlhf_small": "super3_rlhf",
    "super3_swe1_small": "super3_swe1",
}
"""Table → the one it is laid over."""
PREPARATIONS = ("super3_data_prep", "nano3_data_prep")
TABLES = sorted(file.stem for file in HERE.glob("*.tsv"))


@cache
def lines(table: str) -> Mapping[str, Any]:
    """Key → value as the table has it; None for a key that it takes away."""
    rows = (line.partition("\t") for line in (HERE / f"{table}.tsv").read_text().splitlines())
    return MappingProxyType({key: json.loads(text) if text else ... for key, _, text in rows})


@cache
def published(table: str) -> Mapping[str, Any]:
    """Key → value of the whole published config, with interpolations."""
    values = published(PARENTS[table]) if table in PARENTS else {}
    return MappingProxyType({key: value for key, value in {**values, **lines(table)}.items() if value is not ...})


def resolved(table: str) -> dict[str, Any]:
    """Key → value, interpolations resolved; paths of data and models as placeholders."""
    OmegaConf.register_new_resolver("mul", lambda one, other: int(one) * int(other), replace=True)
    OmegaConf.register_new_resolver("art", lambda *_: "/path/to/artifact", replace=True)
    config = OmegaConf.create(nested(published(table)))
    return {key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for key, value in flat(config)}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as groups."""
    root: dict[str, Any] = {}
    for key, value in values.items():
        *groups, last = key.split(".")
        node = root
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    return root


def flat(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Groups as dotted keys."""
    found: list[tuple[str, Any]] = []
    for name in node:
        value = node[name]
        if hasattr(value, "items") and len(value):
            found += flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found
